// How much the prefix cache saves, and whether another size would save more.

import { LineChart, linePath, Spark } from "./charts.js";
import { notOffered } from "./doctor.js";
import { int, kilo, known, share, sig3, ticks, times } from "./numbers.js";
import { Bar, Card, Empty, html, Pool, Table, Tag, unseen, useWidth } from "./parts.js";

const SOURCES = [
	["computed", "fill-p", "computed"],
	["prefix_hit_prefill", "soft-p", "cached on prefill, then transferred"],
	["prefix_hit_decode", "soft-d", "cached on decode, neither computed nor moved"],
];
const HIGH_EVICTIONS = 4; // times the median of the pool
const STEP_MS = 60_000; // from one value of a history to the next
const SIZES = [[0.5, "half"], [1, "today"], [1.5, "1.5 times"], [2, "twice"]];

export function CacheView({ live, fleet }) {
	if (!fleet.offers?.includes("cache")) return notOffered("cache figures", "figures of the prefix cache yet");
	const { cache } = live.data;
	if (!cache) return html`<${Empty} title="Reading the caches" />`;
	const rates = cache.tokens_per_s ?? {};
	const all = SOURCES.reduce((sum, [name]) => sum + (rates[name] ?? 0), 0);
	if (!all) return html`<${Empty} title="No prompt yet">The caches have served no prompt in the last minutes.<//>`;
	const part = (name) => (rates[name] ?? 0) / all;
	return html`<div class="page-h"><h1>${share(1 - part("computed"))} of prompt tokens came from a cache</h1><p>In the last minute.</p></div>
		<${Card} extra="after" title="Prompt tokens by source" note=${`${kilo(all)} tokens/s`}>
			<${Bar} extra="big-bar" parts=${SOURCES.map(([name, kind]) => [kind, part(name)])} />
			<div class="legend">${SOURCES.map(([name, kind, text]) => html`<span><i class=${kind} /><b>${share(part(name))}</b> ${text}, ${kilo(rates[name])} tokens/s</span>`)}</div>
		<//>
		<div class="grid cache"><${Workers} cache=${cache} fleet=${fleet} /><${Sizes} curve=${cache.miss_curve} /></div>
		<${Prefixes} prefixes=${cache.prefixes ?? []} />`;
}

function Workers({ cache, fleet }) {
	const rates = (cache.workers ?? []).map((each) => each.evictions_per_s).filter(known).sort((a, b) => a - b);
	const usual = rates[Math.floor(rates.length / 2)] ?? 0;
	const role = (id) => fleet.workers.find((each) => each.worker_id === id)?.role ?? "decode";
	const row = (each) => {
		const isHigh = each.evictions_per_s > 1 && each.evictions_per_s > HIGH_EVICTIONS * usual;
		const kind = role(each.worker_id);
		return html`<tr class=${isHigh ? "hot" : ""}>
			<th scope="row"><span class="named"><${Pool} role=${kind} />${each.worker_id}</span></th>
			<td class="num"><b>${share(each.hit_rate)}</b></td>
			<td class="wide-col"><${Bar} parts=${[[`fill-${kind[0]}`, each.hit_rate ?? 0]]} /></td>
			<td><${Spark} values=${each.hit_rate_history ?? []} kind=${kind} /></td>
			<td class="num wide-col">${int(each.blocks_cached)}</td>
			<td class="num">${isHigh ? html`<${Tag} kind="warn">▲ ${sig3(each.evictions_per_s)}<//>` : sig3(each.evictions_per_s)}</td>
		</tr>`;
	};
	const history = cache.evictions_history ?? [];
	const columns = ["worker", ["hit rate", "num"], [unseen("hit rate as a bar"), "wide-col"], "trend", ["cached blocks", "num wide-col"], ["evicted/s", "num"]];
	return html`<${Card} title="Hit rate by worker" note="trend over the last hour">
		<${Table} label="Hit rate by worker" extra="mid-rows" columns=${columns}>${(cache.workers ?? []).map(row)}<//>
		${history.length
			? html`<div class="ch-h after"><h3>Evictions</h3><span class="t">blocks/s, worst worker</span></div>
				<${LineChart} series=${[{ values: history, kind: "decode" }]} startUs=${(cache.history_end_us ?? 0) - (history.length - 1) * STEP_MS * 1000} stepMs=${STEP_MS} height=${130} hasAxis=${true}
					ticks=${ticks(Math.max(1, ...history.filter(known)))} write=${sig3} label="Blocks evicted per second on the worst worker, last hour" />`
			: null}
	<//>`;
}

/** The point of the curve nearest to a number of blocks, on a scale of ratios. */
export const nearest = (points, blocks) =>
	points.reduce((best, each) => (best && Math.abs(Math.log(best.blocks / blocks)) <= Math.abs(Math.log(each.blocks / blocks)) ? best : each), null);

function Sizes({ curve }) {
	const points = (curve?.points ?? []).filter((each) => each.blocks > 0);
	const now = curve?.blocks_now;
	const columns = ["cache size", ["blocks", "num wide-col"], ["hit rate", "num"], ["prefill pressure", "num"]];
	return html`<${Card} title="What another cache size would give">
		${points.length > 1 && now
			? html`<p class="small dim">Miss ratio by cache size, from sampled reuse distances (1 of ${Math.round(1 / curve.sample_rate)} blocks), whole fleet.</p>
				<${Curve} points=${points} now=${now} />
				<${Table} label="Effect of other cache sizes" columns=${columns}>
					${SIZES.map(([factor, name]) => {
						const point = nearest(points, now * factor);
						return html`<tr class=${factor === 1 ? "chosen" : ""}><th scope="row">${name}</th><td class="num wide-col">${int(now * factor)}</td><td class="num">${share(1 - point.miss_ratio)}</td><td class="num">${times(point.prefill_pressure)}</td></tr>`;
					})}
				<//>`
			: html`<p class="dim">Too few blocks were used again for a curve.</p>`}
	<//>`;
}

function Curve({ points, now }) {
	const [ref, width] = useWidth();
	const [height, x0, top] = [286, 44, 10];
	const [x1, y0] = [width - 12, height - 40];
	const x = (blocks) => x0 + (x1 - x0) * Math.min(1, Math.max(0, (Math.log2(blocks / now) + 2) / 4));
	const y = (v) => y0 - (y0 - top) * v;
	const seen = points.filter((each) => each.blocks >= now / 4.2 && each.blocks <= now * 4.2);
	const at = nearest(points, now);
	return html`<div ref=${ref}>${width
		? html`<svg width=${width} height=${height} viewBox="0 0 ${width} ${height}" role="img" aria-label=${`Miss ratio by cache size: ${share(at.miss_ratio)} today`}>
			${[0, 0.25, 0.5, 0.75, 1].map((v) => html`<line class="grid-l" x1=${x0} x2=${x1} y1=${y(v)} y2=${y(v)} /><text x=${x0 - 8} y=${y(v) + 4} text-anchor="end">${share(v)}</text>`)}
			${[[0.25, "¼×", "start"], [0.5, "½×", "middle"], [1, "today", "middle"], [2, "2×", "middle"], [4, "4×", "end"]].map(([v, name, anchor]) => html`<text x=${x(now * v)} y=${y0 + 18} text-anchor=${anchor}>${name}</text>`)}
			<text x=${(x0 + x1) / 2} y=${y0 + 36} text-anchor="middle">cache size of the fleet</text>
			<line class="flag" x1=${x(now)} x2=${x(now)} y1=${top} y2=${y0} />
			<path class="line prefill" stroke-width="2.25" d=${linePath(seen.map((each) => each.miss_ratio), (i) => x(seen[i].blocks), y)} />
			<circle class="end prefill" cx=${x(now)} cy=${y(at.miss_ratio)} r="4" /><text class="ink" x=${x(now) + 8} y=${y(at.miss_ratio) - 8}>${share(at.miss_ratio)} miss</text>
		</svg>`
		: null}</div>`;
}

function Prefixes({ prefixes }) {
	const most = Math.max(1, ...prefixes.map((each) => each.tokens_saved_per_min));
	const row = (each) => html`<tr>
		<th scope="row"><span class="mono">${each.hash.slice(0, 8)}</span><span class="at more">${each.workers.join(", ")}</span></th>
		<td class="num">${int(each.num_tokens)}</td><td class="num wide-col">${int(each.num_blocks)}</td><td class="num">${sig3(each.hits_per_min)}</td><td class="num">${kilo(each.tokens_saved_per_min)}</td>
		<td class="wide-col"><${Bar} parts=${[["fill-n", each.tokens_saved_per_min / most]]} /></td><td class="dim wide-col">${each.workers.join(", ")}</td>
	</tr>`;
	const columns = ["prefix", ["tokens", "num"], ["blocks", "num wide-col"], ["hits/min", "num"], ["saved tokens/min", "num"], [unseen("saved, as a bar"), "wide-col"], ["held by", "wide-col"]];
	return html`<${Card} extra="after" title="Hottest prefixes" note="by tokens saved; named by the hash of their last block, never by their text">
		<${Table} label="Hottest prefixes" extra="mid-rows" columns=${columns}>${prefixes.map(row)}<//>
	<//>`;
}
