// How much the prefix cache saves, and whether another size would save more.

import { hline, label, LineChart, linePath, Spark, vline } from "./charts.js";
import { count, int, kilo, known, share, sig3, ticks, times } from "./numbers.js";
import { Bar, Card, clamped, Empty, html, Legend, Named, Sized, Table, Tag, unseen } from "./parts.js";

const SOURCES = [
	["computed", "fill-p", "computed"],
	["prefix_hit_prefill", "soft-p", "cached on prefill, then transferred"],
	["prefix_hit_decode", "soft-d", "cached on decode, neither computed nor moved"],
];
const HIGH_EVICTIONS = 4; // times the median of the pool
const STEP_MS = 60_000; // from one value of a history to the next
/** Cache sizes in relation to that of now: in the table, and on the axis. */
const SIZES = [[0.5, "half"], [1, "today"], [1.5, "1.5 times"], [2, "twice"]];
const TICKS = [[0.25, "¼×", "start"], [0.5, "½×"], [1, "today"], [2, "2×"], [4, "4×", "end"]];

export function CacheView({ data: cache }) {
	const { tokens_per_s: rates, workers, prefixes } = cache;
	const all = SOURCES.reduce((sum, [name]) => sum + rates[name], 0);
	if (!all) return html`<${Empty} title="No prompt yet">The caches have served no prompt in the last minutes.<//>`;
	const parts = SOURCES.map(([name, kind]) => [kind, rates[name] / all]);
	const legend = SOURCES.map(([name, kind, text]) => [
		kind,
		html`<b>${share(rates[name] / all)}</b> ${text}, ${kilo(rates[name])} tokens/s`,
	]);
	return html`<div class="page-h">
			<h1>${share(1 - rates.computed / all)} of prompt tokens came from a cache</h1>
			<p>In the last minute.</p>
		</div>
		<div class="grid">
			<${Card} title="Prompt tokens by source" note="${kilo(all)} tokens/s">
				<${Bar} extra="big-bar" parts=${parts} /><${Legend} extra="" entries=${legend} />
			<//>
			<div class="grid cache">
				<${Card} title="Hit rate by worker" note="trend over the last hour">
					<${HitRates} workers=${workers} /><${Evictions} history=${cache.evictions_history} endUs=${cache.history_end_us} />
				<//>
				<${Card} title="What another cache size would give"><${Sizes} ...${cache.miss_curve} /><//>
			</div>
			<${Card}
				title="Hottest prefixes"
				note="by tokens saved; named by the hash of their last block, never by their text"
			>
				<${Prefixes} prefixes=${prefixes} />
			<//>
		</div>`;
}

function HitRates({ workers }) {
	const rates = workers.map((each) => each.evictions_per_s).filter(known).sort((a, b) => a - b);
	const usual = rates[Math.floor(rates.length / 2)] ?? 0;
	const row = ({ worker_id: id, role, hit_rate: rate, hit_rate_history: history, blocks_cached: blocks, evictions_per_s: evicted }) => {
		const isHigh = evicted > 1 && evicted > HIGH_EVICTIONS * usual;
		const cells = [
			html`<${Named} role=${role} id=${id} />`,
			html`<b>${share(rate)}</b>`,
			html`<${Bar} parts=${[[`fill-${role[0]}`, rate]]} />`,
			html`<${Spark} values=${history} kind=${role} />`,
			int(blocks),
			isHigh ? html`<${Tag} kind="warn">▲ ${sig3(evicted)}<//>` : sig3(evicted),
		];
		return { cells, kind: isHigh ? "hot" : "" };
	};
	const bars = [unseen("hit rate as a bar"), "wide-col"];
	const columns = ["worker", ["hit rate", "num"], bars, "trend", ["cached blocks", "num wide-col"], ["evicted/s", "num"]];
	return html`<${Table} label="Hit rate by worker" extra="mid-rows" columns=${columns} rows=${workers.map(row)} />`;
}

function Evictions({ history, endUs }) {
	if (!history.length) return null;
	return html`<div class="ch-h after"><h3>Evictions</h3><span class="t">blocks/s, worst worker</span></div>
		<${LineChart}
			series=${[{ values: history, kind: "decode" }]}
			startUs=${endUs - (history.length - 1) * STEP_MS * 1000}
			stepMs=${STEP_MS}
			height=${130}
			hasAxis
			ticks=${ticks(Math.max(1, ...history.filter(known)))}
			write=${sig3}
			label="Blocks evicted per second on the worst worker, last hour"
		/>`;
}

/** The point of the curve nearest to a number of blocks, on a scale of ratios. */
function nearest(points, blocks) {
	const distance = (point) => Math.abs(Math.log(point.blocks / blocks));
	return points.toSorted((a, b) => distance(a) - distance(b))[0];
}

function Sizes({ points, blocks_now: now, sample_rate: rate }) {
	const used = points.filter((each) => each.blocks > 0);
	if (used.length < 2) return html`<p>Too few blocks were used again for a curve.</p>`;
	const row = ([factor, name]) => {
		const { miss_ratio: missed, prefill_pressure: pressure } = nearest(used, now * factor);
		return { cells: [name, int(now * factor), share(1 - missed), times(pressure)], kind: factor === 1 ? "chosen" : "" };
	};
	const columns = ["cache size", ["blocks", "num wide-col"], ["hit rate", "num"], ["prefill pressure", "num"]];
	return html`<p class="small">
			Miss ratio by cache size, from sampled reuse distances (1 of ${count(1 / rate, "block")}), whole fleet.
		</p>
		<${Curve} points=${used} now=${now} />
		<${Table} label="Effect of other cache sizes" columns=${columns} rows=${SIZES.map(row)} />`;
}

const Curve = (props) => html`<${Sized} draw=${(width) => curve(props, width)} />`;

function curve({ points, now }, width) {
	const [x0, x1, top, y0] = [50, width - 12, 10, 246];
	const doublings = (blocks) => Math.log2(blocks / now);
	const x = (blocks) => x0 + (x1 - x0) * clamped((doublings(blocks) + 2) / 4, 0, 1);
	const y = (v) => y0 - (y0 - top) * v;
	const seen = points.filter((each) => Math.abs(doublings(each.blocks)) < 2.1);
	const missed = nearest(points, now).miss_ratio;
	const line = linePath(seen.map((each) => each.miss_ratio), (i) => x(seen[i].blocks), y);
	return html`<svg width=${width} height="286" role="img" aria-label="Miss ratio by cache size: ${share(missed)} today">
		${[0, 0.25, 0.5, 0.75, 1].map((v) => [hline("grid-l", y(v), x0, x1), label(x0 - 8, y(v) + 4, share(v), "end")])}
		${TICKS.map(([factor, name, anchor]) => label(x(now * factor), y0 + 18, name, anchor))}
		${label((x0 + x1) / 2, y0 + 36, "cache size of the fleet")} ${vline("flag", x(now), top, y0)}
		<path class="line prefill" stroke-width="2.25" d=${line} />
		<circle class="end prefill" cx=${x(now)} cy=${y(missed)} r="4" />
		${label(x(now) + 8, y(missed) - 8, `${share(missed)} miss`, "start", "ink")}
	</svg>`;
}

function Prefixes({ prefixes }) {
	const most = Math.max(1, ...prefixes.map((each) => each.tokens_saved_per_min));
	const row = ({ hash, num_tokens, num_blocks, hits_per_min, tokens_saved_per_min: saved, workers }) => {
		const holders = workers.join(", ");
		return [
			html`<span class="mono">${hash.slice(0, 8)}</span><span class="at more">${holders}</span>`,
			int(num_tokens),
			int(num_blocks),
			sig3(hits_per_min),
			kilo(saved),
			html`<${Bar} parts=${[["fill-n", saved / most]]} />`,
			html`<span class="dim">${holders}</span>`,
		];
	};
	const sizes = [["tokens", "num"], ["blocks", "num wide-col"], ["hits/min", "num"], ["saved tokens/min", "num"]];
	const columns = ["prefix", ...sizes, [unseen("saved, as a bar"), "wide-col"], ["held by", "wide-col"]];
	return html`<${Table} label="Hottest prefixes" extra="mid-rows" columns=${columns} rows=${prefixes.map(row)} />`;
}
