// Stages of a request: their names, their patterns, and the table in which they add up.

import { ms1 } from "./numbers.js";
import { Bar, Card, Columns, html, Scroll, Tag } from "./parts.js";

/** name, pattern, and the pattern where the decode worker computes the prompt itself */
const STAGES = {
	tokenize: ["Receive and tokenise", "fill-r"],
	placement: ["Place", "fill-r"],
	lost_attempt: ["Lost attempt", "lostf"],
	dispatch: ["Send to workers", "fill-r"],
	queue: ["Queue", "soft-p", "soft-d"],
	prefill: ["Prefill", "fill-p"],
	between_chunks: ["Wait between chunks", "gap"],
	report: ["First token to router", "fill-n"],
	delivery: ["First token to client", "fill-r"],
	transfer: ["Handoff: transfer not hidden", "exposed"],
	step_boundary: ["Handoff: wait for a step", "soft-d"],
	decode: ["Decode steps", "fill-d"],
	shared_decode: ["Decode steps shared with prefill", "fill-d"],
	stall: ["Stalls between steps", "gap"],
	between_steps: ["Between steps", "fill-n"],
	last_token: ["Last token to client", "fill-r"],
	waiting: ["Not reported yet", "soft-n"],
	unexplained: ["Unexplained", "none"],
};
/** More of the first token's time than this without a span means that spans are missing. */
export const MOST_UNEXPLAINED = 0.02;

export const stageName = (stage) => STAGES[stage]?.[0] ?? stage;
export const stageKind = (stage, isLocal) => {
	const [, kind, local] = STAGES[stage] ?? [stage, "fill-n"];
	return isLocal && local ? local : kind;
};
export const total = (stages) => stages.reduce((all, { ms }) => all + ms, 0);

/** The largest stage that has a name. */
export function largest(stages) {
	const named = stages.filter(({ stage }) => stage !== "unexplained");
	return named.reduce((best, each) => (best && best.ms >= each.ms ? best : each), null);
}

export function StageBar({ stages, isLocal }) {
	const all = total(stages);
	const parts = stages
		.filter(({ ms }) => all && ms / all > 0.004)
		.map(({ stage, ms }) => [stageKind(stage, isLocal), ms / all]);
	return html`<${Bar} parts=${parts} />`;
}

/** Every millisecond belongs to one row; rows add up to the head of their part. */
export function StageTable({ trace }) {
	const isLocal = !trace.attempts.at(-1)?.prefill;
	const first = trace.stages.filter((each) => each.part === "first_token");
	const rest = trace.stages.filter((each) => each.part === "rest");
	const title = trace.first_token_us ? "Up to the first token" : "Until now, without a token";
	const columns = ["stage and place", ["ms", "num"], ["share", "num"], ["what happened", "wide-col"]];
	return html`<${Card} title="Where every millisecond went">
		<${Scroll} label="Stages">
			<table class="stages">
				<caption class="sr">Stages of the request</caption>
				<${Columns} names=${columns} />
				${part(first, title, isLocal, true)}
				${rest.length ? part(rest, "From the first token to the last", isLocal, false) : null}
			</table>
		<//>
	<//>`;
}

function part(stages, title, isLocal, isFirst) {
	const all = total(stages);
	return html`<tbody data-part=${isFirst ? "first_token" : "rest"}>
		<tr class="grp">
			<th scope="rowgroup" colspan="4">
				<span>${title}<b class="end">${ms1(all)} ms</b></span
				><${StageBar} stages=${stages} isLocal=${isLocal} />
			</th>
		</tr>
		${stages.map((each) => row(each, all, isLocal, isFirst))}
	</tbody>`;
}

function row({ stage, where, ms, text }, all, isLocal, isFirst) {
	const isOpen = stage === "unexplained";
	const part = all ? ms / all : 0;
	const isMissing = isOpen && isFirst && part > MOST_UNEXPLAINED;
	return html`<tr data-stage=${stage} data-ms=${ms}>
		<th scope="row">
			<i class="sw ${isOpen ? "open" : stageKind(stage, isLocal)}" />${stageName(stage)}
			${isMissing ? html` <${Tag} kind="warn">missing spans<//>` : null}
			${where ? html`<span class="at">${where}</span>` : null}
			<span class="at more">${text}</span>
		</th>
		<td class="num">${ms1(ms)}</td>
		<td class="num">${(part * 100).toFixed(1)} %</td>
		<td class="dim wide-col">${text}</td>
	</tr>`;
}
