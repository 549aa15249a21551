// The last hour: goodput, TTFT and TPOT on one time axis, with the fleet's events as marks.

import { letter, LineChart } from "./charts.js";
import { clock, known, ms, over, share, share1, ticks } from "./numbers.js";
import { Card, html, Legend, Table, Tag, useState } from "./parts.js";

const SHOWN_EVENTS = 8;
const ROWS_OF_TABLE = 12;
const LEGEND = [["ln", "p95"], ["ln p50", "p50"], ["ln aim", "target"], ["miss", "missed"]];
const SERIES = ["ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms"];
const COLUMNS = ["goodput", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"].map((name) => [name, "num"]);

/** The newest events of the time shown, with a letter each, oldest first. */
const lettered = (events, startUs) =>
	events
		.filter((each) => each.at_us >= startUs)
		.sort((a, b) => a.at_us - b.at_us)
		.slice(-SHOWN_EVENTS)
		.map((each, i) => ({ ...each, letter: String.fromCharCode(65 + i) }));

/** A time on an axis: 2 s, 40 ms. */
const tickMs = (v) => (v ? ms(v).replace(/\.0+(?=\D)/, "") : "0");

export function LastHour({ fleet }) {
	const [index, setIndex] = useState(null);
	const { targets, totals, history } = fleet;
	const { goodput, start_us: startUs, step_ms: stepMs } = history;
	const marks = lettered(fleet.events, startUs);
	const shared = { startUs, stepMs, marks, index, onIndex: setIndex, left: 58 };
	const timeOf = (i) => clock(startUs + i * stepMs * 1000);
	const isRead = index !== null;
	const low = Math.min(0.5, Math.floor(Math.min(...goodput.filter(known), 1) * 4) / 4);
	const goodNow = totals.goodput ?? goodput.findLast(known);
	const latency = (name, title, kind, shape) => {
		const [high, mid] = [history[`${name}_p95_ms`], history[`${name}_p50_ms`]];
		const target = targets[`${name}_target_ms`];
		const now = totals[`${name}_p95_ms`] ?? high.findLast(known);
		return html`<${Chart}
			...${shared}
			...${shape}
			title=${title}
			now=${ms(now)}
			aim="p95, target ${ms(target)}"
			isMissed=${over(now, target)}
			read=${isRead && `p95 ${ms(high[index])}, p50 ${ms(mid[index])}`}
			ticks=${ticks(Math.max(1, (target ?? 0) * 1.25, ...[...high, ...mid].filter(known)))}
			write=${tickMs}
			target=${target}
			series=${[
				{ values: high, kind },
				{ values: mid, kind, isThin: true },
			]}
		/>`;
	};
	return html`<${Card} title="Last hour" head=${html`<${Legend} entries=${LEGEND} />`}>
		<${Chart}
			...${shared}
			height=${126}
			title="Goodput"
			now=${share1(goodNow)}
			aim="target ${share(targets.goodput_target)} of requests"
			isMissed=${known(goodNow) && goodNow < targets.goodput_target}
			read=${isRead && `${timeOf(index)}  ${share1(goodput[index])}`}
			ticks=${[low, (1 + low) / 2, 1]}
			write=${share}
			target=${targets.goodput_target}
			isBelow
			series=${[{ values: goodput, kind: "ink" }]}
		/>
		${latency("ttft", "TTFT", "prefill", { height: 172 })}
		${latency("tpot", "TPOT", "decode", { height: 186, hasAxis: true, hasLetters: true })}
		<ol class="events" aria-label="Events of the last hour">
			${marks.map(
				(mark) =>
					html`<li>
						<svg width="20" height="20">${letter(mark, 10, 10)}</svg><span class="faint">${clock(mark.at_us)}</span>
						<span>${mark.text}</span>
					</li>`,
			)}
			${!marks.length && html`<li class="none">No worker came, left or was changed.</li>`}
		</ol>
		<${Numbers} history=${history} timeOf=${timeOf} />
	<//>`;
}

const Chart = ({ title, now, aim, isMissed, read, ...lines }) =>
	html`<div class="ch">
		<div class="ch-h">
			<h3>${title}</h3>
			<span class="v">${now}</span><span class="t">${aim}</span>
			${isMissed && html`<${Tag} kind="bad">missed<//>`}<span class="right">${read}</span>
		</div>
		<${LineChart} ...${lines} label="${title} over the last hour, ${aim}, now ${now}" />
	</div>`;

/** The charts' points as a table, the newest first. */
function Numbers({ history, timeOf }) {
	const last = history.goodput.length - 1;
	const step = Math.floor((last + 1) / ROWS_OF_TABLE);
	const rows = [];
	for (let i = last; i >= 0; i -= step) {
		rows.push([timeOf(i), share1(history.goodput[i]), ...SERIES.map((name) => ms(history[name][i]))]);
	}
	return html`<details>
		<summary>The same as numbers</summary>
		<${Table} label="Last hour as numbers" columns=${["time", ...COLUMNS]} rows=${rows} />
	</details>`;
}
