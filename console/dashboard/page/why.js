// Why a request was placed where it was, and which findings and events explain its stages.

import { clock, DASH, int, ms, share } from "./numbers.js";
import { Bar, Card, Facts, html, Pool, Table, Tag, unseen, useLoaded } from "./parts.js";
import { getJson } from "./live.js";
import { total } from "./stages.js";

const NEAR_US = 60_000_000;

export function Why({ trace }) {
	const { placement, attempts, predicted_ttft_ms: predicted } = trace;
	if (!placement) return html`<${Card} title="Why here"><p>It was not placed yet.</p><//>`;
	const at = attempts.findIndex((each) => each.attempt === trace.first_token_attempt);
	const startUs = at > 0 ? attempts[at].started_us : trace.received_us;
	const observed = trace.first_token_us ? (trace.first_token_us - startUs) / 1000 : null;
	const error = predicted > 0 && observed !== null ? observed / predicted - 1 : null;
	const rows = [
		["Predicted first token", ms(predicted)],
		[at > 0 ? `Observed in attempt ${at + 1}` : "Observed", ms(observed)],
		["Error", error === null ? DASH : `${error < 0 ? "−" : "+"}${share(Math.abs(error))}`],
	];
	return html`<${Card} title="Why here" head=${html`<${Tag}>${placement.mode}<//>`}>
		<p>${placement.reason}.</p>
		${placement.excluded.length > 0 &&
		html`<p>Left out: ${placement.excluded.join(", ")}, which failed this request before.</p>`}
		<${Candidates} title="Prefill candidates" role="prefill" list=${placement.prefill_candidates} chosen=${placement.prefill} />
		<${Candidates} title="Decode candidates" role="decode" list=${placement.decode_candidates} chosen=${placement.decode} />
		<p class="small">
			Costs are everybody's time: the wait, the request's own work, and what others lose. Among
			near-ties the choice is random.
		</p>
		<${Facts} kind="facts after" rows=${rows} />
	<//>`;
}

function Candidates({ title, role, list, chosen }) {
	if (!list.length) return null;
	const sorted = list.toSorted((a, b) => a.cost_ms - b.cost_ms);
	const most = Math.max(1, sorted.at(-1).cost_ms);
	const row = (each) => {
		const { worker_id: id, cost_ms: cost, wait_ms: wait, delay_ms: delay } = each;
		const isChosen = id === chosen;
		const nearTie = each.near_tie && html` <span class="faint small">near-tie</span>`;
		const name = isChosen ? ["● ", id, unseen(", chosen")] : [id, nearTie];
		const parts = [
			["fill-n", wait / most],
			[`fill-${role[0]}`, (cost - wait - delay) / most],
			["exposed", delay / most],
		];
		const bar = html`<${Bar} extra="cand" parts=${parts} />`;
		const cells = [name, ms(cost), bar, ms(wait), int(each.missing_tokens), ms(delay)];
		return { cells, kind: isChosen ? "chosen" : "" };
	};
	const columns = ["worker", ["cost", "num"], [unseen("parts"), "wide-col"], ["wait", "num"], ["missing", "num"], ["delay", "num"]];
	return html`<h3 class="cands"><${Pool} role=${role} />${title}</h3>
		<${Table} label=${title} columns=${columns} rows=${sorted.map(row)} />`;
}

/** Findings and events of the request's time that touch its stages. A finding is about the window of
 * examination before it was found, and about all that came since. */
export function explanations(trace, { findings, window_s }, events) {
	const of = (stages) => total(trace.stages.filter((each) => stages.includes(each.stage)));
	const until = trace.finished_us || Number.MAX_SAFE_INTEGER;
	const found = findings
		.filter((each) => !each.since_us || each.since_us - window_s * 1e6 <= until)
		.map(({ title, stages, text }) => ({ href: "#/doctor", title, ms: of(stages), text: text?.[0] }));
	const workers = trace.attempts.flatMap((each) => [each.prefill?.worker_id, each.decode?.worker_id]);
	const near = events.filter(
		(each) =>
			["lost", "drain"].includes(each.kind) &&
			workers.includes(each.worker_id) &&
			each.at_us >= trace.received_us - NEAR_US &&
			each.at_us <= until,
	);
	const text = "The lost attempt, until the next one began.";
	const lost = near.map((each) => ({ href: "#/fleet", title: `${clock(each.at_us)}: ${each.text}`, ms: of(["lost_attempt"]), text }));
	return [...found, ...lost].filter((each) => each.ms > 0).sort((a, b) => b.ms - a.ms);
}

export function Explains({ trace, fleet }) {
	const hasDoctor = fleet.offers.includes("doctor");
	const { value } = useLoaded(async (signal) => hasDoctor && getJson("doctor", signal), [trace.request_id]);
	const list = explanations(trace, value || { findings: [] }, fleet.events);
	return html`<${Card} title="What explains it" note="findings and events at ${clock(trace.received_us)}">
		${list.length
			? html`<ul class="expl">
					${list.map(
						(each) =>
							html`<li>
								<a href=${each.href}>${each.title}</a><b class="num">${ms(each.ms)}</b><span class="dim">${each.text}</span>
							</li>`,
					)}
				</ul>`
			: html`<p>No finding or event of that time touches this request.</p>`}
	<//>`;
}
