// The last hour: goodput, TTFT and TPOT on one time axis, with the fleet's events as marks.

import { LineChart } from "./charts.js";
import { clock, known, ms, share, share1, ticks } from "./numbers.js";
import { html, Table, Tag, useState } from "./parts.js";

const SHOWN_EVENTS = 8;
const ROWS_OF_TABLE = 12;
const POINTS = 121;
const STEP_MS = 30_000;

/** The newest events of the time shown, with a letter each, oldest first. */
export function lettered(events, startUs) {
	const seen = events.filter((each) => !startUs || each.at_us >= startUs);
	seen.sort((a, b) => a.at_us - b.at_us);
	return seen
		.slice(-SHOWN_EVENTS)
		.map((each, i) => ({ ...each, letter: String.fromCharCode(65 + i) }));
}

/** The history as a whole hour: points from before the router's start are not known. */
export function wholeHour(history, nowUs) {
	const step = history.step_ms ?? STEP_MS;
	const length = history.goodput?.length ?? 0;
	const missing = Math.max(0, POINTS - length);
	const start = (history.start_us ?? nowUs) - missing * step * 1000;
	const padded = Object.entries(history)
		.filter(([, values]) => Array.isArray(values))
		.map(([name, values]) => [name, [...Array(missing).fill(null), ...values]]);
	return { ...Object.fromEntries(padded), start_us: start, step_ms: step };
}

/** A time on an axis: 2 s, 40 ms. */
const tickMs = (v) => (v ? ms(v).replace(/\.0+(?=\D)/, "") : "0");

/** The last known value of a series. */
const last = (values) => values?.findLast(known) ?? null;
const most = (...lists) => Math.max(0, ...lists.flat().filter(known));

export function LastHour({ fleet, nowUs }) {
	const [index, setIndex] = useState(null);
	const history = wholeHour(fleet.history ?? {}, nowUs);
	const targets = fleet.targets ?? {};
	const totals = fleet.totals ?? {};
	const marks = lettered(fleet.events ?? [], history.start_us);
	const time = { startUs: history.start_us, stepMs: history.step_ms };
	const shared = { ...time, marks, index, onIndex: setIndex };
	const at = (values) => (index === null ? null : values?.[index]);
	const goodput = history.goodput ?? [];
	const low = Math.min(0.5, Math.floor(Math.min(...goodput.filter(known), 1) * 4) / 4);
	const read = (name) =>
		index === null
			? ""
			: `p95 ${ms(at(history[`${name}_p95_ms`]))}, p50 ${ms(at(history[`${name}_p50_ms`]))}`;
	const when = clock(time.startUs + (index ?? 0) * time.stepMs * 1000);
	const latency = (name, title, kind, target, height, extra) => {
		const [high, mid] = [history[`${name}_p95_ms`] ?? [], history[`${name}_p50_ms`] ?? []];
		const scale = ticks(Math.max(most(high, mid), (target ?? 0) * 1.25, 1));
		const now = totals[`${name}_p95_ms`] ?? last(high);
		return html`<${Chart}
			title=${title}
			now=${ms(now)}
			aim=${`p95, target ${ms(target)}`}
			isMissed=${known(now) && known(target) && now > target}
			read=${read(name)}
		>
			<${LineChart}
				...${shared}
				...${extra}
				height=${height}
				ticks=${scale}
				write=${tickMs}
				left=${58}
				target=${target}
				series=${[
					{ values: high, kind },
					{ values: mid, kind, isThin: true },
				]}
				label=${`${title} over the last hour, p95 now ${ms(now)}`}
			/>
		<//>`;
	};
	const goodNow = totals.goodput ?? last(goodput);
	return html`<section class="card">
		<header>
			<h2>Last hour</h2>
			<span class="legend right"
				><span><i class="ln p95"></i>p95</span><span><i class="ln p50"></i>p50</span
				><span><i class="ln aim"></i>target</span><span><i class="miss"></i>missed</span></span
			>
		</header>
		<${Chart}
			title="Goodput"
			now=${share1(goodNow)}
			aim=${`target ${share(targets.goodput_target)} of requests`}
			isMissed=${known(goodNow) && goodNow < targets.goodput_target}
			read=${index === null ? "" : `${when}  ${share1(at(goodput))}`}
		>
			<${LineChart}
				...${shared}
				height=${126}
				ticks=${[low, (1 + low) / 2, 1]}
				write=${(v) => share(v)}
				left=${58}
				target=${targets.goodput_target}
				isBelow=${true}
				series=${[{ values: goodput, kind: "ink" }]}
				label=${`Goodput over the last hour, now ${share1(goodNow)}`}
			/>
		<//>
		${latency("ttft", "TTFT", "prefill", targets.ttft_target_ms, 172, {})}
		${latency("tpot", "TPOT", "decode", targets.tpot_target_ms, 186, {
			hasAxis: true,
			hasLetters: true,
		})}
		<ol class="events" aria-label="Events of the last hour">
			${marks.map(
				(mark) =>
					html`<li>
						<span class="k ${mark.kind}">${mark.letter}</span
						><span class="faint">${clock(mark.at_us)}</span><span>${mark.text}</span>
					</li>`,
			)}
			${marks.length ? null : html`<li class="none">No worker came, left or was changed.</li>`}
		</ol>
		<${Numbers} history=${history} time=${time} />
	</section>`;
}

const Chart = ({ title, now, aim, isMissed, read, children }) =>
	html`<div class="ch">
		<div class="ch-h">
			<h3>${title}</h3>
			<span class="v">${now}</span><span class="t">${aim}</span>
			${isMissed ? html`<${Tag} kind="bad">missed<//>` : null}<span class="right">${read}</span>
		</div>
		${children}
	</div>`;

/** The charts' points as a table, the newest first. */
function Numbers({ history, time }) {
	const points = history.ttft_p95_ms?.length ?? 0;
	const step = Math.max(1, Math.floor(points / ROWS_OF_TABLE));
	const rows = [];
	for (let i = points - 1; i >= 0; i -= step) rows.push(i);
	const columns = ["goodput", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"].map((name) => [name, "num"]);
	return html`<details>
		<summary>The same as numbers</summary>
		<${Table} label="Last hour as numbers" columns=${["time", ...columns]}>
			${rows.map(
				(i) =>
					html`<tr>
						<th scope="row">${clock(time.startUs + i * time.stepMs * 1000)}</th>
						<td class="num">${share1(history.goodput?.[i])}</td>
						${["ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms"].map(
							(name) => html`<td class="num">${ms(history[name]?.[i])}</td>`,
						)}
					</tr>`,
			)}
		<//>
	</details>`;
}
