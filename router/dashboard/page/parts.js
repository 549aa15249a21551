// Small components that all views share. Text from outside is set as text: htm makes elements,
// never markup from strings.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

export { html, useEffect, useLayoutEffect, useRef, useState };

const ICONS = {
	dot: html`<circle cx="6" cy="6" r="4.5" fill="currentColor" />`,
	half: html`<circle cx="6" cy="6" r="4.5" fill="none" stroke="currentColor" stroke-width="1.5" /><path
			d="M6 1.5a4.5 4.5 0 0 1 0 9z"
			fill="currentColor"
		/>`,
	arrow: html`<path d="M6 1v8M2.5 6 6 10l3.5-4" fill="none" stroke="currentColor" stroke-width="1.8" />`,
	cross: html`<path d="M2 2l8 8M10 2l-8 8" stroke="currentColor" stroke-width="2" />`,
	clock: html`<circle cx="6" cy="6" r="4.8" fill="none" stroke="currentColor" stroke-width="1.4" /><path
			d="M6 3v3.2l2 1.3"
			fill="none"
			stroke="currentColor"
			stroke-width="1.4"
		/>`,
	check: html`<path d="M1.5 6.5 4.5 9.5 10.5 2.5" fill="none" stroke="currentColor" stroke-width="2" />`,
	pause: html`<path d="M2 1h3v10H2zM7 1h3v10H7z" fill="currentColor" />`,
	play: html`<path d="M2 1v10l9-5z" fill="currentColor" />`,
	theme: html`<circle cx="6" cy="6" r="5.2" fill="none" stroke="currentColor" stroke-width="1.4" /><path
			d="M6 .8a5.2 5.2 0 0 1 0 10.4z"
			fill="currentColor"
		/>`,
};
const STATE_ICONS = {
	ready: "dot",
	live: "dot",
	loading: "half",
	draining: "arrow",
	lost: "cross",
	stale: "clock",
};

export const Icon = ({ name }) =>
	html`<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">${ICONS[name]}</svg>`;

/** A state by colour, shape and word. */
export const State = ({ state, text }) =>
	html`<span class="state ${state}"><${Icon} name=${STATE_ICONS[state] ?? "half"} />${text ?? state}</span>`;

/** The letter of a pool. */
export const Pool = ({ role }) =>
	html`<span class="pool ${role[0]}" aria-hidden="true">${role[0].toUpperCase()}</span>`;

export const Tag = ({ kind = "", children }) => html`<span class="tag ${kind}">${children}</span>`;

/** A bar of parts `[class, share of one]`. */
export const Bar = ({ parts, extra = "" }) =>
	html`<span class="bar ${extra}"
		>${parts
			.filter(([, width]) => width > 0)
			.map(([kind, width]) => html`<i class=${kind} style=${{ width: `${(width * 100).toFixed(2)}%` }} />`)}</span
	>`;

export const Facts = ({ rows, extra = "" }) =>
	html`<dl class="facts ${extra}">
		${rows.map(
			([name, value, note]) =>
				html`<div><dt>${name}</dt><dd>${value}${note ? html` <small>${note}</small>` : null}</dd></div>`,
		)}
	</dl>`;

/** What is missing, and the command or place that changes it. */
export const Empty = ({ title, children, command, level = "h1" }) =>
	html`<section class="card empty">
		<${level}>${title}</${level}>
		<p>${children}</p>
		${command ? html`<pre>${command}</pre>` : null}
	</section>`;

/** A group of buttons of which one is pressed: `options` are `[value, name]`. */
export const Choice = ({ label, options, value, onChoose }) =>
	html`<div class="seg" role="group" aria-label=${label}>
		${options.map(
			([each, name]) =>
				html`<button type="button" aria-pressed=${String(each === value)} onClick=${() => onChoose(each)}>
					${name}
				</button>`,
		)}
	</div>`;

/** A section with a heading, and a note beside it. */
export const Card = ({ title, note, extra = "", children }) =>
	html`<section class="card ${extra}">
		<header><h2>${title}</h2>${note ? html`<span class="small dim">${note}</span>` : null}</header>
		${children}
	</section>`;

/** The head of a table: each column is its name, or `[name, class]`. */
export const Columns = ({ names }) =>
	html`<thead>
		<tr>${names.map((each) => [each].flat()).map(([name, kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr>
	</thead>`;

/** A table that scrolls sideways where it is too wide, also by keyboard; its children are rows. */
export const Table = ({ label, columns, extra, style, children }) =>
	html`<${Scroll} label=${label}>
		<table class=${extra} style=${style}><${Columns} names=${columns} /><tbody>${children}</tbody></table>
	<//>`;

export const Scroll = ({ label, children }) =>
	html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

/** A name for screen readers where the eye needs none. */
export const unseen = (text) => html`<span class="sr">${text}</span>`;

/** Asks for a key; `onKey` gets it. */
export function KeyForm({ label, onKey }) {
	const onSubmit = (event) => {
		event.preventDefault();
		onKey(event.target.elements.key.value.trim());
	};
	return html`<form class="key" onSubmit=${onSubmit}>
			<label for="key">${label}</label>
			<input id="key" name="key" type="password" autocomplete="off" required />
			<button class="btn main">Unlock</button>
		</form>
		<p class="small">It is kept for this tab only and sent as a header, never in an address.</p>`;
}

export const isTyping = (event) => /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);

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
		const element = ref.current;
		const measure = () => setWidth(element.clientWidth);
		const observer = new ResizeObserver(measure);
		measure();
		observer.observe(element);
		return () => observer.disconnect();
	}, []);
	return [ref, width];
}

/** The answer to `load(signal)`, loaded again when `deps` change or every `everyMs`. */
export function useLoaded(load, deps, everyMs = 0) {
	const [state, setState] = useState({ value: null, error: null });
	useEffect(() => {
		const stop = new AbortController();
		let timer = null;
		const run = async () => {
			try {
				const value = await load(stop.signal);
				if (!stop.signal.aborted) setState({ value, error: null });
			} catch (error) {
				if (!stop.signal.aborted) setState((former) => ({ value: former.value, error }));
			}
			if (everyMs && !stop.signal.aborted) timer = setTimeout(run, everyMs);
		};
		setState({ value: null, error: null });
		run();
		return () => {
			stop.abort();
			clearTimeout(timer);
		};
	}, deps);
	return state;
}
