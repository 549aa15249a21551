// What is wrong, and what to change: findings with their evidence, and the checks that passed.

import { clock, count, ms, sig3, times } from "./numbers.js";
import { Bar, Card, copy, Empty, html, Icon, Tag } from "./parts.js";

export function Doctor({ fleet, data: doctor }) {
	const { findings, passed } = doctor;
	const { tone, verdict, cause } = fleet.pressure;
	const isCalm = ["ok", "idle"].includes(tone);
	if (!findings.length && !doctor.is_conclusive) {
		return html`<${Empty} title=${isCalm ? "No fault is known" : verdict}>
			To judge speed, the doctor needs ${count(doctor.min_requests, "request")} within ten minutes. It has
			${" "}${doctor.num_requests}.
		<//>`;
	}
	const minutes = `the last ${count(doctor.window_s / 60, "minute")}`;
	if (!findings.length) {
		return html`<div class="grid">
			<section class="card calm">
				${isCalm && html`<${Icon} name="check" />`}
				<div><h1>${isCalm ? "The fleet is healthy" : verdict}</h1><p>${!isCalm && `${cause} `}${count(passed.length, "check")} over ${minutes} found nothing.</p></div>
			</section>
			<${Passed} title="What was checked" passed=${passed} />
		</div>`;
	}
	return html`<div class="page-h">
			<h1>${count(findings.length, "finding")}, ${count(passed.length, "check")} passed</h1>
			<p>From ${minutes}, newest data ${clock(doctor.checked_us)}. <code>baton doctor</code> prints the same.</p>
		</div>
		<div class="grid">
			${findings.map((each, i) => html`<${Finding} key="${each.rule} ${each.title}" finding=${each} id="f${i}" />`)}
			<${Passed} title="Checks that found nothing" passed=${passed} />
		</div>`;
}

const isUrgent = ({ urgency }) => urgency === "urgent";

function Finding({ finding, id }) {
	const kind = isUrgent(finding) ? "bad" : "warn";
	return html`<article class="card dx ${kind}" aria-labelledby=${id}>
		<div>
			<${Tag} kind=${kind}>${finding.urgency}<//>
			<span class="small faint"> since ${clock(finding.since_us)} · ${finding.rule}</span>
			<h2 id=${id}>${finding.title}</h2>
			${finding.text.map((each) => html`<p>${each}</p>`)}
		</div>
		<div><${Evidence} ...${finding.evidence} /></div>
		<div><h3>Change</h3>${finding.changes.map((each) => html`<${Change} ...${each} />`)}</div>
	</article>`;
}

/** At most one set of bars, and at most four numbers. */
function Evidence({ kind, unit, bars, numbers }) {
	const most = Math.max(1e-9, ...bars.map((each) => each.value));
	const write = (v) => (unit === "ms" ? ms(v) : `${sig3(v)}\u00a0${unit}`.trim());
	return html`<h3>Evidence: ${kind}</h3>
		<div class="hb">
			${bars.map(
				({ name, value, is_flagged: isFlagged }) =>
					html`<span>${name}</span><${Bar} parts=${[[isFlagged ? "exposed" : "fill-n", value / most]]} />
						<b class="num">${write(value)}</b>`,
			)}
		</div>
		<div class="ev-n">${numbers.map(({ name, value }) => html`<span><b>${value}</b>${name}</span>`)}</div>`;
}

function Change({ setting, scope, old, new: next, text, predicted, live }) {
	const values = [old, next].filter(Boolean).join(" → ");
	return html`<div class="chg">
		<code>${setting} ${values}</code>${scope && html` <span class="small faint">${scope}</span>`}
		<p>
			${text}
			${predicted && ` Predicted: prefill ${times(predicted.prefill)}, decode ${times(predicted.decode)}.`}
		</p>
		<div class="acts">
			${live && html`<a class="btn" href="#/controls">Open in Controls</a>`}
			<button class="btn" onClick=${() => copy(`${setting}=${next ?? ""}`, "Copied")}>Copy</button>
		</div>
	</div>`;
}

const Passed = ({ title, passed }) =>
	html`<${Card} title=${title}>
		<ul class="checks">
			${passed.map(
				(each) => html`<li><${Icon} name="check" /><span><b>${each.title}</b><br />${each.text}</span></li>`,
			)}
		</ul>
	<//>`;
