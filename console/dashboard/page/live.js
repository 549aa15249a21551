// The page's data: one stream of summaries from the router, and single documents on demand.
//
// Summaries replace each other; the last one is kept and nothing else, so a page that stays open
// does not grow. The key is kept for this tab and goes out as a header, never in an address.

import { setClockStep } from "./numbers.js";

const SILENT_AFTER_MS = 5000;
const RETRIES_MS = [1000, 2000, 4000, 8000];
const KEY = "baton-key";

const LISTS = { workers: ["worker_id", "worker_ids"], pairs: ["pair_id", "pair_ids"] };

/** A reader's summary after `changed`; the router left out what did not change. */
export function merged(known, changed) {
	const result = { ...known, ...changed };
	for (const [name, [key, order]] of Object.entries(LISTS)) {
		if (!changed[name]) continue;
		const entries = new Map();
		for (const each of [...(known[name] ?? []), ...changed[name]]) {
			entries.set(each[key], { ...entries.get(each[key]), ...each });
		}
		result[name] = result[order].map((id) => entries.get(id));
	}
	return result;
}

/** The whole server-sent events of a text, as their fields, and the rest of the text. */
function parseEvents(text) {
	const blocks = text.split("\n\n");
	const rest = blocks.pop();
	const events = blocks.map((block) => Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s))));
	return { events: events.filter((each) => each.data), rest };
}

const getKey = () => sessionStorage.getItem(KEY);
export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** Throws an error with the `status` of the answer if the router refuses. */
async function ask(path, options) {
	const headers = { accept: "application/json", ...options.headers };
	if (getKey()) headers.authorization = `Bearer ${getKey()}`;
	const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
		throw error.name === "AbortError" ? error : new Error("the router does not answer");
	});
	if (response.ok) return response;
	const { status } = response;
	const body = await response.json().catch(() => null);
	throw Object.assign(new Error(body?.error?.message ?? `HTTP ${status}`), { status });
}

/** The JSON of a path of the router, as `fleet`; relative, so that a path prefix works. */
export const getJson = async (path, signal) => (await ask(`../${path}`, { signal })).json();

export async function postJson(path, body) {
	const headers = { "content-type": "application/json" };
	return (await ask(`../${path}`, { method: "POST", body: JSON.stringify(body), headers })).json();
}

/** The stream. `onChange` is called when data or the state of the connection changed. */
export class Live {
	data = {};
	state = "connecting"; // live, silent, locked
	lockedReason = "";
	heardMs = 0;
	retryAtMs = 0;
	clockOffsetMs = 0;
	pausedMs = 0;
	view = "";
	mayControl = Boolean(getKey()); // whether a key was given that may open the controls
	#stop = null;
	#timer = null;
	#seen = {}; // the router process that each event came from, by the event's name
	#lastId = "";
	#failures = 0;

	constructor(onChange) {
		this.onChange = onChange;
		setInterval(() => this.#watch(), 500);
	}

	/** The time by the clock of the router's reports: the browser's clock may be wrong. */
	now() {
		return Date.now() + this.clockOffsetMs;
	}

	open(view) {
		this.view = view;
		this.#close();
		if (!this.pausedMs) this.#run();
	}

	/** Stop reading while the page is hidden; once it is visible, take one full summary. */
	setHidden(isHidden) {
		this.#close();
		if (!isHidden && !this.pausedMs && this.state !== "locked") this.#run();
	}

	#close() {
		this.#stop?.abort();
		this.#stop = null;
		clearTimeout(this.#timer);
	}

	pause(isPaused) {
		this.pausedMs = isPaused ? this.now() : 0;
		if (isPaused) this.#close();
		else this.#run();
		this.onChange();
	}

	/** Try again at once, for example with a new key. */
	retry() {
		this.#close();
		this.state = "connecting";
		this.#run();
		this.onChange();
	}

	/** Reads until stopped; after a broken connection, the next one continues after the last summary. */
	async #run() {
		const { signal } = (this.#stop = new AbortController());
		this.heardMs = Date.now();
		this.#seen = {};
		this.#lastId = "";
		this.#failures = 0;
		while (!signal.aborted) {
			const error = await this.#read(signal).catch((failed) => failed);
			if (signal.aborted) return;
			if (error?.status === 401) {
				this.state = "locked";
				this.lockedReason = error.message;
				this.data = {};
				this.#stop = null;
				this.onChange();
				return;
			}
			const wait = RETRIES_MS[this.#failures++] ?? RETRIES_MS.at(-1);
			this.retryAtMs = Date.now() + wait;
			await new Promise((resolve) => (this.#timer = setTimeout(resolve, wait)));
		}
	}

	async #read(signal) {
		const headers = this.#lastId && { "last-event-id": this.#lastId };
		const response = await ask(`stream?view=${this.view}`, { signal, headers });
		const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
		let text = "";
		for (;;) {
			const { value, done } = await reader.read();
			if (done || signal.aborted) return;
			const { events, rest } = parseEvents(text + value);
			text = rest;
			events.forEach((each) => this.#take(each));
			if (events.length) this.onChange();
		}
	}

	#take({ event: name, id, data }) {
		const feed = id.split("-")[0];
		const known = feed === this.#seen[name] ? this.data[name] : {};
		this.#seen[name] = feed;
		this.#lastId = id;
		this.#failures = 0;
		this.data = { ...this.data, [name]: merged(known, JSON.parse(data)) };
		this.state = "live";
		this.heardMs = Date.now();
		if (this.data.fleet?.clock) this.#setClock(this.data.fleet.clock);
	}

	/** Correct for a browser's clock that differs by more than a summary's way takes. */
	#setClock({ now_us, step_us }) {
		const offset = now_us / 1000 - Date.now();
		this.clockOffsetMs = Math.abs(offset) > 2000 ? offset : 0;
		setClockStep(step_us);
	}

	#watch() {
		if (this.pausedMs || this.state === "locked" || !this.#stop) return;
		if (Date.now() - this.heardMs > SILENT_AFTER_MS) this.state = "silent";
		if (this.state !== "live") this.onChange();
	}
}
