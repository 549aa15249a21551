// The frame: routes, header, keys, theme, pause, and the state of the connection.

import { render } from "./vendor/htm-preact.js";
import { CacheView } from "./cache.js";
import { Controls } from "./controls.js";
import { isDialogOpen, KeysDialog } from "./dialog.js";
import { Doctor } from "./doctor.js";
import { Fleet } from "./fleet.js";
import { Live } from "./live.js";
import { age, clock, count } from "./numbers.js";
import { copy, Empty, html, Icon, isTyping, KeyForm, shortcuts, State, toast, useEffect, useLayoutEffect, useShortcuts, useState } from "./parts.js";
import { Requests } from "./requests.js";

const VIEWS = {
	fleet: ["Fleet", Fleet],
	requests: ["Requests", Requests],
	doctor: ["Doctor", Doctor],
	cache: ["Cache", CacheView],
	controls: ["Controls", Controls],
};
const SUMMED_UP = ["doctor", "cache"]; // views with a summary of their own in the stream
const THEME = "baton-theme";
const THEMES = ["", "light", "dark"];

const route = () => {
	const [, view, id] = location.hash.split("?")[0].split("/");
	return Object.hasOwn(VIEWS, view) ? { view, id: decodeURIComponent(id ?? "") } : { view: "fleet", id: "" };
};
const go = (view) => (location.hash = `#/${view}`);
const theme = () => document.documentElement.dataset.theme;
const setTheme = (name) => (document.documentElement.dataset.theme = name);

let redraw = () => {};
const live = new Live(() => redraw());

function cycleTheme() {
	const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
	setTheme(next);
	localStorage.setItem(THEME, next);
	toast(`Theme: ${next || "as the system"}`);
	redraw();
}

function App() {
	const [, setCount] = useState(0);
	const [{ view, id }, setRoute] = useState(route());
	const [areKeysOn, setKeysOn] = useState(true);
	const [areKeysShown, setKeysShown] = useState(false);
	const [title, View] = VIEWS[view];
	redraw = () => setCount((number) => number + 1);

	useEffect(() => {
		const onHash = () => {
			location.hash === "#main" || setRoute(route());
			scrollTo(0, 0);
			document.getElementById("main").focus({ preventScroll: true });
		};
		const onVisible = () => live.setHidden(document.hidden);
		addEventListener("hashchange", onHash);
		document.addEventListener("visibilitychange", onVisible);
	}, []);
	useEffect(() => {
		document.title = `${title} · Baton`;
		live.open(view);
	}, [view]);
	useLayoutEffect(() => {
		const onKey = (event) => areKeysOn && onShortcut(event);
		addEventListener("keydown", onKey);
		return () => removeEventListener("keydown", onKey);
	}, [areKeysOn]);
	useShortcuts({
		"/": (event) => {
			event.preventDefault();
			const focus = () => document.getElementById("q")?.focus();
			focus();
			if (view === "requests") return;
			go("requests");
			setTimeout(focus, 50);
		},
		Escape: () => id && go(view),
		c: () => copy(location.href, "Link copied"),
		p: () => live.pause(!live.pausedMs),
		t: cycleTheme,
		"?": () => setKeysShown(true),
		...Object.fromEntries(Object.keys(VIEWS).map((name, i) => [i + 1, () => go(name)])),
	});

	return html`<${Header} view=${view} onKeys=${() => setKeysShown(true)} />
		<main id="main" tabindex="-1"><${Body} view=${View} name=${view} id=${id} /></main>
		<div class="toast" id="toast" role="status" />
		${areKeysShown &&
		html`<${KeysDialog} areOn=${areKeysOn} onSwitch=${setKeysOn} onClose=${() => setKeysShown(false)} />`}`;
}

function onShortcut(event) {
	if (event.ctrlKey || event.metaKey || event.altKey || isDialogOpen()) return;
	if (!isTyping(event)) shortcuts[event.key]?.(event);
	else if (event.key === "Escape") event.target.blur();
}

function Body({ view, name, id }) {
	if (live.state === "locked") {
		return html`<${KeyForm}
			title="This needs a key"
			reason=${live.lockedReason}
			label="Viewer's or admin key"
			onKey=${() => live.retry()}
		/>`;
	}
	const { fleet } = live.data;
	const isSilent = live.state === "silent";
	if (!fleet && isSilent) {
		return html`<${Empty} title="The router does not answer">
			No answer for ${age(Date.now() - live.heardMs)}. The page tries again by itself.
		<//>`;
	}
	if (!fleet) return html`<${Empty} title="Reading the fleet">The first summary is on its way.<//>`;
	if (!fleet.offers.includes(name)) return html`<${Empty} title="No data">This router does not offer this view yet.<//>`;
	const data = live.data[name];
	if (SUMMED_UP.includes(name) && !data) return html`<${Empty} title="Reading the ${name}" />`;
	return html`${isSilent && html`<${Banner} />`}
		<div class=${isSilent ? "gone" : ""}><${view} live=${live} fleet=${fleet} data=${data} id=${id} key=${name} /></div>`;
}

function Banner() {
	const waits = live.retryAtMs - Date.now();
	return html`<div class="banner">
		<b>No data for ${age(Date.now() - live.heardMs)}.</b>
		<span>
			The router does not answer; the numbers below are of ${clock((live.heardMs + live.clockOffsetMs) * 1000)}.
			${waits > 0 && ` The page tries again in ${age(waits)}.`}
		</span>
	</div>`;
}

function Header({ view, onKeys }) {
	const { cluster, workers, pressure } = live.data.fleet ?? {};
	const model = workers?.find((each) => each.model)?.model;
	return html`<header class="top">
		<div class="top-in">
			<a class="brand" href="#/fleet" aria-label="Baton, fleet">
				<svg width="26" height="18" aria-hidden="true">
					<path class="mark p" d="M3 14.5 14 3.5" /><path class="mark d" d="M14.5 14.5 23 6" />
				</svg>
				Baton
			</a>
			<nav aria-label="Views">
				<ul>
					${Object.entries(VIEWS).map(
						([name, [title]]) =>
							html`<li>
								<a href="#/${name}" aria-current=${name === view ? "page" : null}>
									${title}${name === "doctor" && pressure?.findings > 0 && html`<${Findings} number=${pressure.findings} />`}
								</a>
							</li>`,
					)}
				</ul>
			</nav>
			<div class="who">
				<span class="wide">${cluster && html`cluster <b>${cluster}</b>`}${cluster && model && " · "}${model}</span>
				<${Connection} />
				<${IconButton}
					name=${live.pausedMs ? "play" : "pause"}
					label=${live.pausedMs ? "Resume updates" : "Pause updates"}
					onClick=${() => live.pause(!live.pausedMs)}
				/>
				<${IconButton} name="theme" label="Theme: ${theme() || "as the system"}" onClick=${cycleTheme} />
				<button class="btn icon mid" aria-label="Keyboard shortcuts" onClick=${onKeys}>?</button>
			</div>
		</div>
	</header>`;
}

const IconButton = ({ name, label, onClick }) =>
	html`<button class="btn icon" aria-label=${label} onClick=${onClick}><${Icon} name=${name} /></button>`;

/** Live, silent or paused, with the time; changes of the state are announced. */
function Connection() {
	const { state, pausedMs } = live;
	const isLive = state === "live" && !pausedMs;
	let [text, said] = [state, state];
	if (state === "silent") [text, said] = [`no data for ${age(Date.now() - live.heardMs)}`, "No data"];
	if (pausedMs) [text, said] = [`paused ${clock(pausedMs * 1000)}`, "Paused"];
	return html`<span class="live" id="live">
			<${State} state=${isLive ? "live" : "stale"} text=${text} />
			${isLive && html`<span class="dim mid">${clock(live.now() * 1000)} UTC</span>`}
		</span>
		<span class="sr" role="status">${said}</span>`;
}

const Findings = ({ number }) =>
	html`<span class="count" role="img" aria-label=${count(number, "finding")}>${number}</span>`;

setTheme(localStorage.getItem(THEME) ?? "");
render(html`<${App} />`, document.getElementById("app"));
