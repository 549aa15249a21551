// What is wrong, and what to change: findings with their evidence, and the checks that passed.

import { LineChart } from "./charts.js";
import { clock, known, ms, share, sig3, ticks, times } from "./numbers.js";
import { Bar, Card, copy, Empty, html, Icon, Tag } from "./parts.js";

const URGENT = "urgent";
const UNITS = { ms, share, times };

export const notOffered = (what, why) => html`<${Empty} title=${`No ${what}`}>This router does not offer ${why}.<//>`;

export function Doctor({ live, fleet }) {
	if (!fleet.offers?.includes("doctor")) return notOffered("diagnosis", "a diagnosis yet");
	const { doctor } = live.data;
	if (!doctor) return html`<${Empty} title="Reading the diagnosis" />`;
	const { findings = [], passed = [] } = doctor;
	if (!findings.length && !passed.length) {
		const { num_requests: seen = 0, min_requests: needed = 100 } = doctor;
		return html`<${Empty} title="Nothing to diagnose">The doctor needs a ready decode worker and ${needed} requests within ten minutes. It has ${seen}.<//>`;
	}
	const minutes = `the last ${Math.round((doctor.window_s ?? 600) / 60)} minutes`;
	const order = [...findings].sort((a, b) => (b.urgency === URGENT) - (a.urgency === URGENT) || a.since_us - b.since_us);
	if (!findings.length) {
		return html`<section class="card calm"><${Icon} name="check" /><div><h1>The fleet is healthy</h1><p>${passed.length} checks over ${minutes} found nothing.</p></div></section>
			<${Passed} title="What was checked" passed=${passed} />`;
	}
	const s = findings.length === 1 ? "" : "s";
	return html`<div class="page-h">
			<h1>${findings.length} finding${s}, ${passed.length} checks passed</h1>
			<p>From ${minutes}, newest data ${clock(doctor.checked_us)}. <code>baton doctor</code> prints the same.</p>
		</div>
		<div class="grid">
			${order.map((each, i) => html`<${Finding} key=${`${each.rule} ${each.title}`} finding=${each} id=${`f${i}`} history=${fleet.history} />`)}
			<${Passed} title="Checks that found nothing" passed=${passed} />
		</div>`;
}

function Finding({ finding, id, history }) {
	const isUrgent = finding.urgency === URGENT;
	return html`<article class="card dx ${isUrgent ? "bad" : ""}" aria-labelledby=${id}>
		<div>
			<${Tag} kind=${isUrgent ? "bad" : "warn"}>${finding.urgency}<//>
			<span class="small faint"> since ${clock(finding.since_us)} · ${finding.rule}</span>
			<h2 id=${id}>${finding.title}</h2>
			${(finding.text ?? []).map((each) => html`<p>${each}</p>`)}
		</div>
		<div><${Evidence} evidence=${finding.evidence ?? {}} history=${history} /></div>
		<div><h3>Change</h3>${(finding.changes ?? []).map((each) => html`<${Change} change=${each} />`)}</div>
	</article>`;
}

const write = (v, unit) => (known(v) ? (UNITS[unit] ? UNITS[unit](v) : `${sig3(v)}${unit ? `\u00a0${unit}` : ""}`) : (v ?? "–"));

/** One chart or one set of bars, and at most four numbers. */
export function Evidence({ evidence, history }) {
	const { kind, unit, series, bars, numbers } = evidence;
	const values = series?.[0]?.values ?? series;
	const most = Math.max(1e-9, ...(bars ?? []).map((each) => each.value));
	const numberList = Array.isArray(numbers) ? numbers : Object.entries(numbers ?? {}).map(([name, value]) => ({ name, value }));
	return html`<h3>Evidence${kind ? `: ${kind}` : ""}</h3>
		${values?.length
			? html`<${LineChart} series=${[{ values, kind: "prefill" }]} startUs=${history?.start_us ?? 0} stepMs=${history?.step_ms ?? 30000} height=${122} left=${62} hasAxis=${true}
					ticks=${ticks(Math.max(1e-9, ...values.filter(known)))} write=${(v) => write(v, unit)} label=${`Evidence: ${kind}`} />`
			: null}
		${bars?.length
			? html`<div class="hb">${bars.map((each) => html`<span class="nowrap">${each.name}</span><${Bar} parts=${[[each.is_flagged ? "exposed" : "fill-n", each.value / most]]} /><b class="num">${write(each.value, unit)}</b>`)}</div>`
			: null}
		${numberList.length ? html`<div class="ev-n">${numberList.slice(0, 4).map((each) => html`<span><b>${write(each.value, each.unit)}</b>${each.name}</span>`)}</div>` : null}`;
}

function Change({ change }) {
	const { setting, scope, old, new: next, text, predicted, live } = change;
	const line = [setting, known(old) || old ? `${old} → ${next}` : next].filter((each) => each !== null && each !== undefined).join(" ");
	const effect = predicted ? ` Predicted: prefill ${times(predicted.prefill)}, decode ${times(predicted.decode)}.` : "";
	return html`<div class="chg">
		<code>${line}</code>${scope ? html` <span class="small faint">${scope}</span>` : null}
		<p>${text}${effect}</p>
		<div class="acts">
			${live ? html`<a class="btn" href="#/controls">Open in Controls</a>` : null}
			${setting ? html`<button class="btn" type="button" onClick=${() => copy(`${setting}=${next ?? ""}`, "Copied")}>Copy</button>` : null}
		</div>
	</div>`;
}

const Passed = ({ title, passed }) => html`<${Card} extra="passed" title=${title}>
	<ul class="checks">${passed.map((each) => html`<li><${Icon} name="check" /><span><b>${each.title}</b><br />${each.text}</span></li>`)}</ul>
<//>`;

