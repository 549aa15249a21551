// Why a request was placed where it was, and which findings and events explain its stages.

import { clock, DASH, int, known, ms } from "./numbers.js";
import { Card, Facts, html, Pool, Table, Tag, unseen, useLoaded } from "./parts.js";
import { getJson } from "./live.js";

const NEAR_MS = 60_000;

export function Why({ trace }) {
	const attempt = trace.attempts.at(-1);
	const placement = attempt?.placement ?? trace.placement;
	if (!placement) {
		return html`<${Card} title="Why here"><p class="dim">It was not placed yet.</p><//>`;
	}
	const excluded = placement.excluded ?? [];
	const observed = trace.first_token_us
		? (trace.first_token_us - (trace.attempts.length > 1 ? attempt.started_us : trace.received_us)) / 1000
		: null;
	const predicted = trace.predicted_ttft_ms;
	const error = known(predicted) && predicted > 0 && observed !== null ? observed / predicted - 1 : null;
	return html`<section class="card">
		<header><h2>Why here</h2><${Tag}>${placement.mode}<//></header>
		<p class="dim">${placement.reason}.</p>
		${excluded.length
			? html`<p class="dim">Left out: ${excluded.join(", ")}, which failed this request before.</p>`
			: null}
		<${Candidates} title="Prefill candidates" role="prefill" list=${placement.prefill_candidates} chosen=${placement.prefill} />
		<${Candidates} title="Decode candidates" role="decode" list=${placement.decode_candidates} chosen=${placement.decode} />
		<p class="small dim">
			Costs are in tokens of prefill work: load, tokens that its cache lacks, and tokens that its
			memory is short of. Among near-ties the choice is random.
		</p>
		<${Facts}
			extra="after"
			rows=${[
				["Predicted first token", ms(predicted)],
				[trace.attempts.length > 1 ? "Observed in this attempt" : "Observed", ms(observed)],
				["Error", error === null ? DASH : `${error < 0 ? "−" : "+"}${Math.abs(error * 100).toFixed(0)} %`],
			]}
		/>
	</section>`;
}

function Candidates({ title, role, list, chosen }) {
	if (!list?.length) return null;
	const rows = [...list].sort((a, b) => a.cost - b.cost);
	const most = Math.max(1, ...rows.map((each) => each.cost));
	const width = (v) => ({ width: `${Math.max(0, v / most) * 100}%` });
	const missing = (each) => Math.max(0, each.cost - each.load_tokens - each.shortage_tokens);
	const parts = ["load", "missing", "shortage"].map((name) => [name, "num"]);
	return html`<h3 class="cands"><${Pool} role=${role} />${title}</h3>
		<${Table} label=${title} columns=${["worker", ["cost", "num"], [unseen("parts"), "wide-col"], ...parts]}>
			${rows.map((each) => {
				const isChosen = each.worker_id === chosen;
				const nearTie = each.near_tie ? html` <span class="faint small">near-tie</span>` : null;
				return html`<tr class=${isChosen ? "chosen" : ""}>
					<th scope="row" class="nowrap">
						${isChosen ? "● " : ""}${each.worker_id}${isChosen ? unseen(", chosen") : nearTie}
					</th>
					<td class="num">${int(each.cost)}</td>
					<td class="wide-col">
						<span class="cand">
							<i class="fill-n" style=${width(each.load_tokens)} />
							<i class="fill-${role[0]}" style=${width(missing(each))} />
							<i class="exposed" style=${width(each.shortage_tokens)} />
						</span>
					</td>
					<td class="num">${int(each.load_tokens)}</td>
					<td class="num">${int(each.missing_tokens)}</td>
					<td class="num">${int(each.shortage_tokens)}</td>
				</tr>`;
			})}
		<//>`;
}

/** Findings and events of the request's time that touch its stages. */
export function explanations(trace, findings, events) {
	const of = (stages) =>
		trace.stages.filter((each) => stages.includes(each.stage)).reduce((all, each) => all + each.ms, 0);
	const until = trace.finished_us || Number.MAX_SAFE_INTEGER;
	const found = findings
		.filter((each) => !each.since_us || each.since_us <= until)
		.map((each) => ({ href: "#/doctor", title: each.title, ms: of(each.stages ?? []), text: each.text?.[0] ?? "" }))
		.filter((each) => each.ms > 0);
	const workers = trace.attempts.flatMap((each) => [each.prefill?.worker_id, each.decode?.worker_id]);
	const lost = of(["lost_attempt"]);
	const near = events.filter(
		(each) =>
			["lost", "drain"].includes(each.kind) &&
			workers.includes(each.worker_id) &&
			each.at_us >= trace.received_us - NEAR_MS * 1000 &&
			each.at_us <= until,
	);
	if (lost > 0) {
		for (const each of near) {
			const text = "The lost attempt, until the next one began.";
			found.push({ href: "#/fleet", title: `${clock(each.at_us)}: ${each.text}`, ms: lost, text });
		}
	}
	return found.sort((a, b) => b.ms - a.ms);
}

export function Explains({ trace, fleet }) {
	const hasDoctor = fleet.offers?.includes("doctor");
	const { value } = useLoaded(async (signal) => (hasDoctor ? getJson("doctor", signal) : null), [trace.request_id]);
	const list = explanations(trace, value?.findings ?? [], fleet.events ?? []);
	return html`<${Card} title="What explains it" note=${`findings and events at ${clock(trace.received_us)}`}>
		${list.length
			? html`<ul class="expl">
					${list.map(
						(each) =>
							html`<li>
								<a href=${each.href}>${each.title}</a><b class="num">${ms(each.ms)}</b
								><span class="dim">${each.text}</span>
							</li>`,
					)}
				</ul>`
			: html`<p class="dim">No finding or event of that time touches this request.</p>`}
	<//>`;
}
