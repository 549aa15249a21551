// The lanes of one request, and the line that reads the span under pointer or keyboard.

import { layOut } from "./lanes.js";
import { int, ms, ms1 } from "./numbers.js";
import { Choice, html, isTyping, stepping, useEffect, useState, useWidth } from "./parts.js";

const GUTTER_PX = 136;
const NARROW_PX = 560;
const CHARACTER_PX = 7;
const FILLS = {
	router: "var(--text-2)",
	stream: "var(--line)",
	prefill: "var(--prefill)",
	decode: "var(--decode)",
	hidden: "var(--text-3)",
	queue: "url(#h-queue)",
	wait: "url(#h-wait)",
	exposed: "url(#h-exposed)",
	gap: "url(#h-gap)",
	lost: "url(#h-lost)",
};
const LEGEND = [
	["soft-p", "queue"],
	["fill-p", "chunk"],
	["fill-n", "transfer, hidden"],
	["exposed", "transfer, not hidden"],
	["fill-d", "decode step"],
	["gap", "gap"],
];

/** The patterns of bars: their meaning never depends on colour alone. */
export function Patterns() {
	const stripes = (id, role, step, width) =>
		html`<pattern
			id=${id}
			width=${step}
			height=${step}
			patternUnits="userSpaceOnUse"
			patternTransform="rotate(45)"
			><rect width=${step} height=${step} class="soft-${role}-fill" /><rect
				width=${width}
				height=${step}
				class="${role}-fill"
		/></pattern>`;
	return html`<svg class="patterns" width="0" height="0" aria-hidden="true" focusable="false">
		<defs>
			${stripes("h-queue", "prefill", 6, 2)} ${stripes("h-wait", "decode", 6, 2)}
			${stripes("h-exposed", "warn", 6, 3)} ${stripes("h-lost", "bad", 7, 2)}
			<pattern id="h-gap" width="5" height="5" patternUnits="userSpaceOnUse">
				<rect width="5" height="5" class="surface-fill" /><circle cx="2.5" cy="2.5" r="1.1" class="warn-fill" />
			</pattern>
		</defs>
	</svg>`;
}

/** `trace` has times since its arrival, as `relative` makes them. */
export function Waterfall({ id, trace, targetMs }) {
	const [isWhole, setWhole] = useState(false);
	const [picked, setPicked] = useState(-1);
	const [ref, width] = useWidth();
	useEffect(() => setPicked(-1), [id, isWhole]);
	useEffect(() => {
		const onKey = (event) => {
			if (event.key === "z" && !isTyping(event) && !event.ctrlKey && !event.metaKey) setWhole((now) => !now);
		};
		addEventListener("keydown", onKey);
		return () => removeEventListener("keydown", onKey);
	}, []);
	const isNarrow = width < NARROW_PX;
	const shape = { width, gutter: isNarrow ? 0 : GUTTER_PX, isWhole, isNarrow };
	const layout = width ? layOut(trace, shape) : null;
	const spans = layout ? layout.boxes.filter((box) => box.span).sort((a, b) => a.span.from - b.span.from) : [];
	return html`<section class="card">
		<header>
			<h2>Waterfall</h2>
			<${Choice}
				label="Range"
				options=${[
					[false, "First tokens"],
					[true, "Whole request"],
				]}
				value=${isWhole}
				onChoose=${setWhole}
			/>
			<span class="legend right"
				>${LEGEND.map(([kind, name]) => html`<span><i class=${kind}></i>${name}</span>`)}</span
			>
		</header>
		<div class="wf" ref=${ref}>
			${layout ? html`<${Drawing} ...${{ id, trace, targetMs, layout, spans, picked, setPicked, isNarrow, width }} />` : null}
		</div>
		<div class="read" role="status">${reading(spans[picked])}</div>
	</section>`;
}

function reading(box) {
	if (!box) {
		return html`Point at a span, or press <kbd>←</kbd> <kbd>→</kbd> in the chart, to read it here.`;
	}
	const { name, rest, from, to } = box.span;
	return html`<b>${name}</b> ${rest} · ${ms((to - from) / 1000)}, from ${ms1(from / 1000)} to ${ms1(to / 1000)} ms`;
}

function Drawing({ id, trace, targetMs, layout, spans, picked, setPicked, isNarrow, width }) {
	const { axis, height } = layout;
	const gutter = isNarrow ? 0 : GUTTER_PX;
	const chosen = spans[picked];
	const onKeyDown = stepping((step) => setPicked(Math.min(spans.length - 1, Math.max(0, picked + step))));
	const onPointerMove = (event) => {
		const box = event.currentTarget.getBoundingClientRect();
		const [px, py] = [event.clientX - box.left, event.clientY - box.top];
		const found = spans.findIndex(
			(each) => px >= each.x - 2 && px <= each.x + each.width + 2 && py >= each.y && py <= each.y + each.height,
		);
		if (found >= 0 && found !== picked) setPicked(found);
	};
	const ticks = [];
	for (let v = 0; v * 1000 <= axis.end; v += axis.step) ticks.push(v);
	return html`<svg
		width=${width}
		height=${height}
		viewBox="0 0 ${width} ${height}"
		role="img"
		tabindex="0"
		aria-label=${`Waterfall of ${id}. Arrow keys step through its ${spans.length} spans.`}
		onKeyDown=${onKeyDown}
		onPointerMove=${onPointerMove}
	>
		${layout.lanes.map(
			(lane) =>
				html`<rect class="lane" x=${gutter} y=${lane.y} width=${axis.right - gutter} height=${lane.height} rx="3" />`,
		)}
		${ticks.map((v) => tick(v, axis, height))} ${layout.lanes.map((lane) => laneName(lane, isNarrow))}
		${layout.heads.map(
			(head) => html`<text class=${head.isFailed ? "lab failed" : "lab"} x="0" y=${head.y}>${head.text}</text>`,
		)}
		${layout.boxes.map((box) => bar(box))} ${flags(trace, targetMs, axis, height, isNarrow)}
		${chosen
			? html`<rect
					class="sel"
					rx="2"
					x=${chosen.x - 1}
					y=${chosen.y - 1}
					width=${chosen.width + 2}
					height=${chosen.height + 2}
				/>`
			: null}
	</svg>`;
}

function tick(v, axis, height) {
	const x = axis.x(v * 1000);
	const hasText = v === 0 || x < axis.right - 26;
	return html`<line class="grid-l" x1=${x} x2=${x} y1=${axis.top - 6} y2=${height} />${hasText
			? html`<text x=${x} y=${axis.top - 10} text-anchor=${v === 0 ? "start" : "middle"}>
					${v === 0 ? "0 ms" : int(v)}
				</text>`
			: null}`;
}

function laneName({ y, height, name, sub }, isNarrow) {
	if (isNarrow) {
		return html`<text class="lab" x="0" y=${y - 7}>${name} <tspan class="lab2">${sub}</tspan></text>`;
	}
	const middle = y + height / 2;
	return html`<text class="lab" x="0" y=${sub ? middle - 2 : middle + 4}>${name}</text>${sub
			? html`<text class="lab2" x="0" y=${middle + 13}>${sub}</text>`
			: null}`;
}

function bar({ x, y, width, height, fill, text, isPlate }) {
	const words = [text ?? ""].flat().find((each) => width > each.length * CHARACTER_PX + 10) ?? "";
	const middle = y + height / 2;
	return html`<rect x=${x.toFixed(1)} y=${y} width=${width.toFixed(1)} height=${height} rx=${width > 5 ? 2 : 0} style=${{ fill: FILLS[fill] }} />${words &&
		isPlate
			? html`<rect x=${x + 4} y=${middle - 9} width=${words.length * 6.9 + 8} height="18" rx="3" class="surface-fill" />`
			: null}${words
			? html`<text class=${isPlate ? "ink" : "in"} x=${x + (isPlate ? 8 : 6)} y=${middle + 4.3}>${words}</text>`
			: null}`;
}

/** The target and the first token as lines through all lanes, with words that do not overlap. */
function flags(trace, targetMs, axis, height, isNarrow) {
	const first = trace.firstToken;
	const target = targetMs ? targetMs * 1000 : null;
	const isSeen = (us) => us !== null && us > 0 && us <= axis.end;
	const isNear = isSeen(first) && isSeen(target) && Math.abs(axis.x(first) - axis.x(target)) < 250;
	const flag = (us, text, isDashed, isLeft) =>
		html`<line class=${isDashed ? "flag dashed" : "flag"} x1=${axis.x(us)} x2=${axis.x(us)} y1="16" y2=${height} />${isNarrow &&
			isNear &&
			isDashed
				? null
				: html`<text class="ink" x=${axis.x(us) + (isLeft ? -5 : 5)} y="14" text-anchor=${isLeft ? "end" : "start"}>${text}</text>`}`;
	return html`${isSeen(target)
		? flag(target, `target ${ms(targetMs)}`, true, axis.x(target) > axis.right - 120 || (isNear && first > target))
		: null}${isSeen(first)
		? flag(first, `first token ${ms(first / 1000)}`, false, axis.x(first) > axis.right - 150 || (isNear && first < target))
		: null}`;
}
