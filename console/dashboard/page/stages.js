// Stages of a request: their names, their patterns, and the table in which they add up.

import { MS, ms1, rows1, share } from "./numbers.js";
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
const MOST_UNEXPLAINED = 0.02;

const stageName = (stage) => STAGES[stage]?.[0] ?? stage;
const stageKind = (stage, isLocal) => {
	const [, kind, local] = STAGES[stage] ?? [stage, "fill-n"];
	return (isLocal && local) || kind;
};
export const total = (stages) => stages.reduce((all, { ms }) => all + ms, 0);
export const largest = (stages) => stages.toSorted((a, b) => b.ms - a.ms)[0];

/** The largest stage that has a name, and its percentage of them all. */
export function largestNamed(stages) {
	const worst = largest(stages.filter(({ stage }) => stage !== "unexplained"));
	if (!worst?.ms) return null;
	return { ...worst, name: stageName(worst.stage).toLowerCase(), percent: share(worst.ms / total(stages)) };
}

export function StageBar({ stages, isLocal }) {
	const all = total(stages);
	const parts = stages.map(({ stage, ms }) => [stageKind(stage, isLocal), ms / all]);
	return html`<${Bar} parts=${parts.filter(([, width]) => width > 0.004)} />`;
}

/** Every millisecond belongs to one row; rows add up to the head of their part. */
export function StageTable({ trace }) {
	const isLocal = !trace.attempts.at(-1)?.prefill;
	const titles = {
		first_token: trace.first_token_us ? "Up to the first token" : "Until now, without a token",
		rest: "From the first token to the last",
	};
	const columns = ["stage and place", ["ms", "num"], ["share", "num"], ["what happened", "wide-col"]];
	return html`<${Card} title="Where every millisecond went">
		<${Scroll} label="Stages">
			<table class="stages">
				<caption class="sr">Stages of the request</caption>
				<${Columns} names=${columns} />
				${Object.entries(titles).map(([part, title]) => rows(trace.stages, part, title, isLocal))}
			</table>
		<//>
	<//>`;
}

function rows(allStages, part, title, isLocal) {
	const stages = allStages.filter((each) => each.part === part);
	const all = total(stages);
	if (!stages.length) return null;
	return html`<tbody data-part=${part}>
		<tr class="grp">
			<th scope="rowgroup" colspan="4">
				<span>${title}<b class="end">${ms1(all, MS)}</b></span><${StageBar} stages=${stages} isLocal=${isLocal} />
			</th>
		</tr>
		${rows1(stages.map(({ ms }) => ms)).map((shown, i) => row(stages[i], shown, all, isLocal))}
	</tbody>`;
}

function row({ part, stage, where, ms, text }, shown, all, isLocal) {
	const isOpen = stage === "unexplained";
	const size = all ? ms / all : 0;
	const isMissing = isOpen && part === "first_token" && size > MOST_UNEXPLAINED;
	return html`<tr data-stage=${stage} data-ms=${ms}>
		<th scope="row">
			<i class="sw ${isOpen ? "open" : stageKind(stage, isLocal)}" />${stageName(stage)}
			${isMissing && html` <${Tag} kind="warn">missing spans<//>`}
			${where && html`<span class="at">${where}</span>`}
			<span class="at more">${text}</span>
		</th>
		<td class="num">${ms1(shown)}</td>
		<td class="num">${share(size)}</td>
		<td class="dim wide-col">${text}</td>
	</tr>`;
}
