// The page's data: one stream of summaries from the router, and single documents on demand.
//
// Summaries replace each other; the last one is kept and nothing else, so a page that stays open
// does not grow. The key is kept for this tab and goes out as a header, never in an address.

export const SILENT_AFTER_MS = 5000;
const RETRIES_MS = [1000, 2000, 4000, 8000];
const KEY = "baton-key";

/** A reader's summary after `changed`; the router left out what did not change. */
export function merged(known, changed) {
	const result = { ...known, ...changed };
	if (changed.workers) {
		const workers = new Map((known.workers ?? []).map((each) => [each.worker_id, each]));
		for (const each of changed.workers) {
			workers.set(each.worker_id, { ...workers.get(each.worker_id), ...each });
		}
		result.workers = result.worker_ids.map((id) => workers.get(id));
	}
	return result;
}

/** Splits text of server-sent events; returns whole events and the rest. */
export function parseEvents(text) {
	const blocks = text.split("\n\n");
	const rest = blocks.pop();
	const events = [];
	for (const block of blocks) {
		const event = { name: "message", id: "", data: "" };
		for (const line of block.split("\n")) {
			const at = line.indexOf(": ");
			if (at < 1) continue;
			const [field, value] = [line.slice(0, at), line.slice(at + 2)];
			if (field === "event") event.name = value;
			else if (field === "id") event.id = value.split("-").join("-"); // a copy: a slice would keep all of `text`
			else if (field === "data") event.data += value;
		}
		if (event.data) events.push(event);
	}
	return { events, rest };
}

export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export function setKey(key) {
	if (key) sessionStorage.setItem(KEY, key);
	else sessionStorage.removeItem(KEY);
}

/** The router refused, or did not answer (status 0). */
export class Refusal extends Error {
	constructor(status, message, code) {
		super(message);
		this.status = status;
		this.code = code;
	}
}

async function ask(path, options = {}) {
	const headers = { accept: "application/json", ...options.headers };
	if (getKey()) headers.authorization = `Bearer ${getKey()}`;
	let response;
	try {
		response = await fetch(path, { ...options, headers, cache: "no-store" });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new Refusal(0, "the router does not answer", null);
	}
	if (response.ok) return response;
	const body = await response.json().catch(() => null);
	const { message, code } = body?.error ?? {};
	throw new Refusal(response.status, message ?? `HTTP ${response.status}`, code ?? null);
}

/** The JSON of a path of the router, as `fleet`; relative, so that a path prefix works. */
export const getJson = async (path, signal) => (await ask(`../${path}`, { signal })).json();

/** The answer to a POST of JSON. */
export const postJson = async (path, body) =>
	(
		await ask(`../${path}`, {
			method: "POST",
			body: JSON.stringify(body),
			headers: { "content-type": "application/json" },
		})
	).json();

/** The stream. `onChange` is called when data or the state of the connection changed. */
export class Live {
	constructor(onChange) {
		this.onChange = onChange;
		this.data = {};
		this.state = "connecting"; // live, silent, locked
		this.lockedReason = "";
		this.heardMs = 0;
		this.retryAtMs = 0;
		this.clockOffsetMs = 0;
		this.pausedMs = 0;
		this.view = "fleet";
		this.stop = null;
		this.timer = null;
		this.mayControl = Boolean(getKey()); // whether a key was given that may open the controls
		this.seen = {}; // the id of the last event by name
		setInterval(() => this.#watch(), 500);
	}

	/** The router's time: the browser's clock may be wrong. */
	now() {
		return Date.now() + this.clockOffsetMs;
	}

	/** Read the summaries of a view from now on. */
	open(view) {
		if (view === this.view && this.stop) return;
		this.view = view;
		this.close();
		if (!this.pausedMs) this.#run();
	}

	/** Stop reading while the page is hidden; once it is visible, take one full summary. */
	setHidden(isHidden) {
		this.close();
		if (!isHidden && !this.pausedMs && this.state !== "locked") this.#run();
	}

	close() {
		this.stop?.abort();
		this.stop = null;
		clearTimeout(this.timer);
	}

	pause(isPaused) {
		this.pausedMs = isPaused ? this.now() : 0;
		if (isPaused) this.close();
		else this.#run();
		this.onChange();
	}

	/** Try again at once, for example with a new key. */
	retry() {
		this.close();
		this.state = "connecting";
		this.#run();
		this.onChange();
	}

	async #run() {
		const stop = new AbortController();
		this.stop = stop;
		this.seen = {};
		this.heardMs = Date.now();
		let lastId = "";
		for (let failures = 0; !stop.signal.aborted; ) {
			try {
				const options = { signal: stop.signal, headers: lastId ? { "last-event-id": lastId } : {} };
				const response = await ask(`stream?view=${this.view}`, options);
				this.#setClock(response.headers.get("date"));
				lastId = await this.#read(response, lastId, stop.signal, () => (failures = 0));
			} catch (error) {
				if (stop.signal.aborted) return;
				if (error.status === 401) {
					this.state = "locked";
					this.lockedReason = error.message;
					this.data = {};
					this.stop = null;
					this.onChange();
					return;
				}
			}
			if (stop.signal.aborted) return;
			const wait = RETRIES_MS[Math.min(failures, RETRIES_MS.length - 1)];
			failures += 1;
			this.retryAtMs = Date.now() + wait;
			await new Promise((resolve) => (this.timer = setTimeout(resolve, wait)));
		}
	}

	async #read(response, lastId, signal, onEvent) {
		const reader = response.body.getReader();
		const decoder = new TextDecoder();
		let text = "";
		try {
			for (;;) {
				const { value, done } = await reader.read();
				if (done || signal.aborted) return lastId;
				const parsed = parseEvents(text + decoder.decode(value, { stream: true }));
				text = parsed.rest;
				for (const event of parsed.events) {
					this.#take(event);
					onEvent();
				}
				if (parsed.events.length) {
					lastId = parsed.events.at(-1).id;
					this.onChange();
				}
			}
		} catch (error) {
			if (error.name === "AbortError") throw error;
			return lastId; // the connection broke: the next one continues after this summary
		}
	}

	#take(event) {
		const isFull = event.id.split("-")[0] !== this.seen[event.name]?.split("-")[0];
		this.seen[event.name] = event.id;
		const known = isFull ? {} : (this.data[event.name] ?? {});
		this.data = { ...this.data, [event.name]: merged(known, JSON.parse(event.data)) };
		this.state = "live";
		this.heardMs = Date.now();
	}

	/** Correct for a browser's clock that is wrong by more than the header's resolution. */
	#setClock(date) {
		const offset = date ? Date.parse(date) + 500 - Date.now() : 0;
		this.clockOffsetMs = Math.abs(offset) > 2000 ? offset : 0;
	}

	#watch() {
		if (this.pausedMs || this.state === "locked" || !this.stop) return;
		if (Date.now() - this.heardMs > SILENT_AFTER_MS) this.state = "silent";
		if (this.state !== "live") this.onChange();
	}
}
