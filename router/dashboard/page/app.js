// The frame: routes, header, keys, theme, pause, and the state of the connection.

import { render } from "./vendor/htm-preact.js";
import { CacheView } from "./cache.js";
import { Controls } from "./controls.js";
import { isDialogOpen, KeysDialog } from "./dialog.js";
import { Doctor } from "./doctor.js";
import { Fleet } from "./fleet.js";
import { getJson, Live, setKey } from "./live.js";
import { age, clock } from "./numbers.js";
import { copy, html, Icon, isTyping, KeyForm, State, toast, useEffect, useState } from "./parts.js";
import { Requests } from "./requests.js";

const VIEWS = [
	["fleet", "Fleet", Fleet],
	["requests", "Requests", Requests],
	["doctor", "Doctor", Doctor],
	["cache", "Cache", CacheView],
	["controls", "Controls", Controls],
];
const THEME = "baton-theme";
const FINDINGS_EVERY_MS = 10_000;

const route = () => {
	const [, view, id] = location.hash.split("/");
	const isKnown = VIEWS.some(([name]) => name === view);
	return { view: isKnown ? view : "fleet", id: isKnown && id ? decodeURIComponent(id) : "" };
};
const setTheme = (name) => {
	if (name) document.documentElement.dataset.theme = name;
	else delete document.documentElement.dataset.theme;
};
const theme = () => document.documentElement.dataset.theme ?? "";

let redraw = () => {};
const live = new Live(() => redraw());

function cycleTheme() {
	const order = ["", "light", "dark"];
	const next = order[(order.indexOf(theme()) + 1) % order.length];
	setTheme(next);
	localStorage.setItem(THEME, next);
	toast(`Theme: ${next || "as the system"}`);
	redraw();
}

function App() {
	const [, setCount] = useState(0);
	const [{ view, id }, setRoute] = useState(route());
	const [keys, setKeys] = useState({ areOn: true, areShown: false });
	redraw = () => setCount((count) => count + 1);

	useEffect(() => {
		const onHash = () => {
			setRoute(route());
			scrollTo(0, 0);
			document.getElementById("main").focus({ preventScroll: true });
		};
		const onVisible = () => live.setHidden(document.hidden);
		addEventListener("hashchange", onHash);
		document.addEventListener("visibilitychange", onVisible);
		return () => {
			removeEventListener("hashchange", onHash);
			document.removeEventListener("visibilitychange", onVisible);
		};
	}, []);
	useEffect(() => live.open(view), [view]);
	useEffect(() => {
		const onKey = (event) => onShortcut(event, keys, setKeys);
		addEventListener("keydown", onKey);
		return () => removeEventListener("keydown", onKey);
	}, [keys]);
	useEffect(() => {
		document.title = `${VIEWS.find(([name]) => name === view)[1]} · Baton`;
	}, [view]);

	const found = VIEWS.find(([name]) => name === view);
	return html`<${Header} view=${view} onKeys=${() => setKeys({ ...keys, areShown: true })} />
		<main id="main" tabindex="-1"><${Body} view=${found[2]} name=${view} id=${id} /></main>
		<div class="toast" id="toast" role="status" aria-live="polite"></div>
		${keys.areShown
			? html`<${KeysDialog}
					areOn=${keys.areOn}
					onSwitch=${(areOn) => setKeys({ ...keys, areOn })}
					onClose=${() => setKeys((now) => ({ ...now, areShown: false }))}
				/>`
			: null}`;
}

function Body({ view, name, id }) {
	if (live.state === "locked") return html`<${Locked} reason=${live.lockedReason} />`;
	const { fleet } = live.data;
	if (!fleet) {
		return html`<section class="card empty">
			<h1>${live.state === "silent" ? "The router does not answer" : "Reading the fleet"}</h1>
			<p>
				${live.state === "silent"
					? `No answer for ${age(Date.now() - live.heardMs)}. The page tries again by itself.`
					: "The first summary is on its way."}
			</p>
		</section>`;
	}
	const isSilent = live.state === "silent";
	const content = html`<${view} live=${live} fleet=${fleet} id=${id} key=${name} />`;
	return html`${isSilent ? html`<${Banner} />` : null}
		<div class=${isSilent ? "gone" : ""}>${content}</div>`;
}

function Banner() {
	const waits = Math.max(0, live.retryAtMs - Date.now());
	return html`<div class="banner">
		<b>No data for ${age(Date.now() - live.heardMs)}.</b>
		<span
			>The router does not answer; the numbers below are of
			${" "}${clock((live.heardMs + live.clockOffsetMs) * 1000)}.
			${waits ? ` The page tries again in ${Math.ceil(waits / 1000)} s.` : ""}</span
		>
	</div>`;
}

function Header({ view, onKeys }) {
	const { fleet } = live.data;
	const model = fleet?.workers?.find((each) => each.model)?.model;
	const cluster = fleet?.cluster;
	return html`<header class="top">
		<div class="top-in">
			<a class="brand" href="#/fleet" aria-label="Baton, fleet"
				><svg width="26" height="18" viewBox="0 0 26 18" aria-hidden="true">
					<path class="mark p" d="M3 14.5 14 3.5" />
					<path class="mark d" d="M14.5 14.5 23 6" /></svg
				>Baton</a
			>
			<nav aria-label="Views">
				<ul>
					${VIEWS.map(
						([name, title]) =>
							html`<li>
								<a href="#/${name}" aria-current=${name === view ? "page" : null}
									>${title}${name === "doctor" ? html`<${Findings} />` : null}</a
								>
							</li>`,
					)}
				</ul>
			</nav>
			<div class="who">
				<span class="wide"
					>${cluster ? html`cluster <b>${cluster}</b>` : null}${cluster && model ? " · " : null}${model}</span
				>
				<${Connection} />
				<button
					class="btn icon"
					type="button"
					id="pause"
					aria-label=${live.pausedMs ? "Resume updates" : "Pause updates"}
					onClick=${() => live.pause(!live.pausedMs)}
				>
					<${Icon} name=${live.pausedMs ? "play" : "pause"} />
				</button>
				<button
					class="btn icon"
					type="button"
					aria-label="Theme: ${theme() || "as the system"}"
					onClick=${cycleTheme}
				>
					<${Icon} name="theme" />
				</button>
				<button class="btn icon mid" type="button" aria-label="Keyboard shortcuts" onClick=${onKeys}>
					?
				</button>
			</div>
		</div>
	</header>`;
}

/** Live, silent or paused, with the time; changes of the state are announced. */
function Connection() {
	const words = {
		live: "live",
		connecting: "connecting",
		locked: "locked",
		silent: `no data for ${age(Date.now() - live.heardMs)}`,
	};
	const kind = live.pausedMs || live.state !== "live" ? "stale" : "live";
	const text = live.pausedMs ? `paused ${clock(live.pausedMs * 1000)}` : words[live.state];
	const at = kind === "live" ? `${clock(live.now() * 1000)} UTC` : "";
	const said = live.pausedMs ? "Paused" : { silent: "No data" }[live.state] ?? words[live.state];
	return html`<span class="live" id="live"
			><${State} state=${kind} text=${text} />${at ? html`<span class="dim mid">${at}</span>` : null}</span
		><span class="sr" role="status">${said}</span>`;
}

/** The number of the doctor's findings; nothing where the router has no doctor. */
function Findings() {
	const [number, setNumber] = useState(0);
	useEffect(() => {
		let timer = null;
		const load = async () => {
			const isOffered = live.data.fleet?.offers?.includes("doctor");
			if (isOffered && !document.hidden && !live.pausedMs && live.state === "live") {
				const found = await getJson("doctor").catch(() => null);
				setNumber(found?.findings?.length ?? 0);
			}
			timer = setTimeout(load, FINDINGS_EVERY_MS);
		};
		timer = setTimeout(load, 300);
		return () => clearTimeout(timer);
	}, []);
	const text = `${number} finding${number === 1 ? "" : "s"}`;
	return number ? html`<span class="count" role="img" aria-label=${text}>${number}</span>` : null;
}

/** In place of the view: a field for the key, which stays in this tab. */
function Locked({ reason }) {
	const onKey = (key) => {
		setKey(key);
		live.retry();
	};
	return html`<section class="card empty">
		<h1>This needs a key</h1>
		<p>${reason}</p>
		<${KeyForm} label="Viewer's or admin key" onKey=${onKey} />
	</section>`;
}

function onShortcut(event, keys, setKeys) {
	if (!keys.areOn || event.ctrlKey || event.metaKey || event.altKey || isDialogOpen()) return;
	if (isTyping(event)) {
		if (event.key === "Escape") event.target.blur();
		return;
	}
	const { view, id } = route();
	const go = (name) => (location.hash = `#/${name}`);
	const actions = {
		"/": () => {
			event.preventDefault();
			const focus = () => document.getElementById("q")?.focus();
			if (view === "requests") focus();
			else {
				go("requests");
				setTimeout(focus, 50);
			}
		},
		Escape: () => id && go(view),
		c: () => copy(location.href, "Link copied"),
		p: () => document.getElementById("pause").click(),
		t: cycleTheme,
		"?": () => setKeys({ ...keys, areShown: true }),
	};
	if (event.key >= "1" && event.key <= "5") go(VIEWS[event.key - 1][0]);
	else actions[event.key]?.();
}

setTheme(localStorage.getItem(THEME) ?? "");
render(html`<${App} />`, document.getElementById("app"));
