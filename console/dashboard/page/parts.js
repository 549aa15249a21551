// Small components that all views share. Text from outside is set as text: htm makes elements,
// never markup from strings.

import { setKey } from "./live.js";
import { px } from "./numbers.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

export { html, useEffect, useLayoutEffect, useRef, useState };

const ring = (r) => `M6 ${6 - r}a${r} ${r} 0 1 1-.01 0z`;

/** What is filled, what is drawn as a line, and the width of that line. */
const ICONS = {
	dot: [ring(4.5)],
	half: ["M6 1.5a4.5 4.5 0 0 1 0 9z", ring(4.5), 1.5],
	arrow: ["", "M6 1v8M2.5 6 6 10l3.5-4", 1.8],
	cross: ["", "M2 2l8 8M10 2l-8 8", 2],
	clock: ["", `${ring(4.8)}M6 3v3.2l2 1.3`, 1.4],
	check: ["", "M1.5 6.5 4.5 9.5 10.5 2.5", 2],
	pause: ["M2 1h3v10H2zM7 1h3v10H7z"],
	play: ["M2 1v10l9-5z"],
	theme: ["M6 .8a5.2 5.2 0 0 1 0 10.4z", ring(5.2), 1.4],
};
const STATE_ICONS = { ready: "dot", live: "dot", draining: "arrow", lost: "cross", stale: "clock" };

export function Icon({ name }) {
	const [filled, line, width] = ICONS[name];
	return html`<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">
		<path d=${filled} fill="currentColor" />
		<path d=${line} fill="none" stroke="currentColor" stroke-width=${width} />
	</svg>`;
}

/** A state by colour, shape and word. */
export const State = ({ state, text }) =>
	html`<span class="state ${state}"><${Icon} name=${STATE_ICONS[state] ?? "half"} />${text}</span>`;

export const Pool = ({ role }) =>
	html`<span class="pool ${role[0]}" aria-hidden="true">${role[0].toUpperCase()}</span>`;

export const Tag = ({ kind = "", children }) => html`<span class="tag ${kind}">${children}</span>`;

export const Named = ({ role, id }) => html`<span class="named"><${Pool} role=${role} />${id}</span>`;

/** A bar of parts `[class, share of one]`. */
export const Bar = ({ parts, extra = "" }) =>
	html`<span class="bar ${extra}">
		${parts
			.filter(([, width]) => width > 0)
			.map(([kind, width]) => html`<i class=${kind} style=${{ width: `${px(width * 100)}%` }} />`)}
	</span>`;

/** What the patterns of a drawing mean: `entries` are `[class, text]`. */
export const Legend = ({ entries, extra = "right" }) =>
	html`<span class="legend ${extra}">
		${entries.map(([kind, text]) => html`<span><i class=${kind} />${text}</span>`)}
	</span>`;

/** Figures by name: `rows` are `[name, value, note]`. */
export const Facts = ({ rows, kind = "facts" }) =>
	html`<dl class=${kind}>
		${rows.map(
			([name, value, note]) => html`<div><dt>${name}</dt><dd>${value}${note && html` <small>${note}</small>`}</dd></div>`,
		)}
	</dl>`;

/** In place of a view: what is missing, and below it `more` about how to get it. */
export const Empty = ({ title, children, more }) =>
	html`<section class="card empty"><h1>${title}</h1><p>${children}</p>${more}</section>`;

/** In place of a view: asks for a key, which stays in this tab. */
export function KeyForm({ title, reason, label, onKey }) {
	const onSubmit = (event) => {
		event.preventDefault();
		setKey(event.target.elements.key.value.trim());
		onKey();
	};
	const form = html`<form class="key" onSubmit=${onSubmit}>
			<label for="key">${label}</label>
			<input id="key" name="key" type="password" autocomplete="off" required />
			<button class="btn main">Unlock</button>
		</form>
		<p class="small">It is kept for this tab only and sent as a header, never in an address.</p>`;
	return html`<${Empty} title=${title} more=${form}>${reason}<//>`;
}

/** A group of buttons of which one is pressed: `options` are `[value, name]`. */
export const Choice = ({ label, options, value, onChoose }) =>
	html`<div class="seg" role="group" aria-label=${label}>
		${options.map(
			([each, name]) =>
				html`<button aria-pressed=${each === value} onClick=${() => onChoose(each)}>${name}</button>`,
		)}
	</div>`;

export const Card = ({ title, note, head, extra = "", children }) =>
	html`<section class="card ${extra}">
		<header><h2>${title}</h2>${note && html`<span class="small dim">${note}</span>`}${head}</header>
		${children}
	</section>`;

/** The head of a table: each column is its name, or `[name, class]`. */
export const Columns = ({ names }) =>
	html`<thead>
		<tr>${names.map((each) => [each].flat()).map(([name, kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr>
	</thead>`;

/** A row is its cells, or `{ cells, kind }`. Cells have their column's class; the first one names the row,
 * unless its column has a class. */
export const PlainTable = ({ columns, rows, extra, style }) =>
	html`<table class=${extra} style=${style}>
		<${Columns} names=${columns} />
		<tbody>
			${rows.map((row) => {
				const { kind, cells = row } = row;
				const kinds = columns.map((each) => [each].flat()[1]);
				const cell = (content, i) =>
					i || kinds[0] ? html`<td class=${kinds[i]}>${content}</td>` : html`<th scope="row">${content}</th>`;
				return html`<tr class=${kind}>${cells.map(cell)}</tr>`;
			})}
		</tbody>
	</table>`;

/** A table that scrolls sideways where it is too wide, also by keyboard. */
export const Table = ({ label, ...table }) => html`<${Scroll} label=${label}><${PlainTable} ...${table} /><//>`;

export const Scroll = ({ label, extra = "scroll", onScroll, children }) =>
	html`<div class=${extra} tabindex="0" role="region" aria-label=${label} onScroll=${onScroll}>${children}</div>`;

/** A name for screen readers where the eye needs none. */
export const unseen = (text) => html`<span class="sr">${text}</span>`;

export const isTyping = (event) => /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);

/** What single keys do, on the page and in the view that is shown. */
export const shortcuts = {};

/** Adds single-key actions while the component is shown. */
export function useShortcuts(actions) {
	useLayoutEffect(() => {
		Object.assign(shortcuts, actions);
		return () => Object.keys(actions).forEach((key) => delete shortcuts[key]);
	});
}

export const clamped = (v, low, high) => Math.min(high, Math.max(low, v));

const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

/** A key handler of a drawing: calls `onStep` with how far the reader goes through it. */
export const stepping = (onStep) => (event) => {
	const step = STEPS[event.key];
	if (!step) return;
	onStep(step);
	event.preventDefault();
	event.stopPropagation();
};

/** A short message at the foot of the page: for what the reader did, not for news of the fleet. */
export function toast(text) {
	const box = document.getElementById("toast");
	box.textContent = text;
	box.classList.add("on");
	clearTimeout(toast.timer);
	toast.timer = setTimeout(() => box.classList.remove("on"), 1800);
}

/** Says what came of `work`: what `done` makes of its result, or why it failed. */
export const told = async (work, done) => toast(await work.then(done, ({ message }) => message));

export async function copy(text, done) {
	try {
		await navigator.clipboard.writeText(text);
		toast(done);
	} catch {
		toast("The browser does not let this page copy");
	}
}

/** The width of an element, in pixels: what it draws depends on it. */
export function useWidth() {
	const ref = useRef(null);
	const [width, setWidth] = useState(0);
	useLayoutEffect(() => {
		const measure = () => setWidth(ref.current.clientWidth);
		const observer = new ResizeObserver(measure);
		measure();
		observer.observe(ref.current);
		return () => observer.disconnect();
	}, []);
	return [ref, width];
}

/** A place that `draw(width)` fills once its width is known. */
export function Sized({ extra, draw }) {
	const [ref, width] = useWidth();
	return html`<div ref=${ref} class=${extra}>${width > 0 && draw(width)}</div>`;
}

/** The answer to `load(signal)`, loaded again when `deps` change, or after `waitMs(answer)` if that is not 0. */
export function useLoaded(load, deps, waitMs = () => 0) {
	const [state, setState] = useState({});
	useEffect(() => {
		const stop = new AbortController();
		let timer = null;
		const run = async () => {
			const loaded = await load(stop.signal).then(
				(value) => ({ value }),
				(error) => ({ error }),
			);
			if (stop.signal.aborted) return;
			setState((former) => ({ value: former.value, ...loaded }));
			const wait = waitMs(loaded.value);
			if (wait) timer = setTimeout(run, wait);
		};
		setState({});
		run();
		return () => {
			stop.abort();
			clearTimeout(timer);
		};
	}, deps);
	return state;
}
