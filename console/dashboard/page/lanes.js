// Lays the spans of a trace out in lanes; pure. Times in the result are microseconds since the
// request arrived, places are pixels. A bar is as long as its span, at least one pixel. In a trace,
// a time of 0 or null did not happen.

import { bytes, count, int, linkRate, ms } from "./numbers.js";

const GUTTER_PX = 136;
export const CHARACTER_PX = 7;
const NARROW_PX = 560;
const ROUTER_PX = 22;
const LANE_PX = 32;
const WRITE_PX = 13;
const GAP_US = 5000;
const FIRST_STEPS = 9;
const TOP = 44;
const TICKS_MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 60000];

/** Until when the range "First tokens" shows: the ninth decode step, or the end. */
function rangeEnd(trace, nowUs, isWhole) {
	const { received_us: zero, first_token_us: first, attempts } = trace;
	const end = Math.max(zero + 1, trace.finished_us || nowUs, trace.last_token_us);
	if (isWhole || !first) return end;
	const steps = attempts.at(-1)?.decode?.steps.slice(0, FIRST_STEPS) ?? [];
	const after = (factor) => zero + (first - zero) * factor;
	return Math.min(end, Math.max(steps.length ? steps.at(-1)[1] : after(1.25), after(1.02)));
}

/** Rows for spans that overlap: each goes into the first row that is free at its start. */
function stacked(spans) {
	const ends = [];
	return spans.map(([start, end]) => {
		const free = ends.findIndex((each) => each <= start);
		const row = free < 0 ? ends.length : free;
		ends[row] = end;
		return row;
	});
}

/** Whether names of the request's workers need a line of their own. */
export const hasLongNames = ({ attempts }) =>
	attempts.some(({ prefill, decode }) => [prefill, decode].some((each) => each?.worker_id.length * CHARACTER_PX > GUTTER_PX));

/** Boxes for the spans, with the names of their lanes, heads of attempts, and the axis of time. */
export function layOut(trace, nowUs, width, isWhole) {
	const { attempts } = trace;
	const isNarrow = width < NARROW_PX || hasLongNames(trace);
	const zero = trace.received_us;
	const end = rangeEnd(trace, nowUs, isWhole);
	const [left, right] = [isNarrow ? 0 : GUTTER_PX, width - 10];
	const scale = (right - left) / (end - zero); // pixels per microsecond
	const x = (us) => left + scale * (us - zero);
	const [boxes, lanes, heads] = [[], [], []];
	let [y, bottom] = [0, TOP];
	const lane = (name, sub, height, gap = 4) => {
		y = bottom + (isNarrow ? 18 : 0);
		bottom = y + height + gap;
		lanes.push({ y, height, name, sub });
	};
	/** Adds a span to the newest lane; `plate` is a text that a pattern would make hard to read. */
	const add = (from, to, fill, name, rest, { dy = 0, height = LANE_PX, until = to, text = "", plate } = {}) => {
		if (!from || !to || from >= end || to < from) return;
		const place = { x: x(from), y: y + dy, width: Math.max(1, x(Math.min(to, end)) - x(from)), height };
		boxes.push({ ...place, fill, text, plate, name, rest, from: from - zero, to: until - zero });
	};
	router(trace, lane, add, isWhole);
	for (const attempt of attempts) {
		if (attempts.length > 1) {
			const failed = attempt.failed ? `, failed: ${attempt.failed}` : "";
			heads.push({ y: bottom + 14, text: `attempt ${attempt.attempt}${failed}`, isFailed: Boolean(failed) });
			bottom += 22;
		}
		if (attempt.prefill) {
			prefillLane(attempt, lane, add);
			transferLane(trace, attempt, lane, add);
		}
		if (attempt.decode) decodeLane(attempt, lane, add, scale);
		bottom += 4;
	}
	const step = TICKS_MS.find((each) => scale * each * 1000 > 74) ?? 120_000;
	const axis = { step, x: (us) => x(zero + us), end: end - zero, left, right, top: TOP };
	return { boxes, lanes, heads, height: bottom + 2, axis, isNarrow };
}

function router(trace, lane, add, isWhole) {
	const { tokenized_us: tokenized, first_token_us: first, last_token_us: last, attempts } = trace;
	const shape = { height: ROUTER_PX };
	lane("router", "", ROUTER_PX, 8);
	add(trace.received_us, tokenized, "dim", "Receive and tokenise", "on the router", shape);
	if (attempts.length) add(tokenized, attempts[0].started_us, "dim", "Place", "on the router", shape);
	attempts.slice(1).forEach(({ started_us: started }, i) => {
		add(attempts[i].failed_us, started, "lost", "Back-off", "before the next attempt", shape);
	});
	add(trace.first_token_received_us, first, "dim", "First token", "detokenised and sent to the client", shape);
	if (isWhole && last > first) add(first, last, "line", "Tokens stream", "to the client", { dy: 8, height: 6 });
}

function prefillLane({ attempt, failed, failed_us: failedUs, prefill }, lane, add) {
	const { worker_id: id, received_us: received, chunks, waits } = prefill;
	lane(id, "prefill", LANE_PX);
	const queued = prefill.scheduled_us || chunks[0]?.[0];
	const plate = `queue ${ms((queued - received) / 1000)}`;
	add(received, queued, "queue", "Queue", `on ${id}`, { plate });
	const reasons = new Map(waits.map(([, to, reason]) => [to, reason]));
	chunks.forEach(([from, to, tokens], i) => {
		const before = chunks[i - 1]?.[1];
		if (from - before > GAP_US) {
			const reason = reasons.get(from) ?? "between two steps";
			add(before, from, "gap", "Wait between chunks", `on ${id}: ${reason}`, { plate: reason });
		}
		const texts = [`${i + 1} · ${int(tokens)} tok`, `${i + 1}`];
		add(from, to, "prefill", `Chunk ${i + 1}`, `on ${id}, ${count(tokens, "token")}`, { text: texts });
	});
	if (failed && failedUs) {
		const from = chunks.at(-1)?.[1] ?? queued ?? received;
		add(from, Math.max(from, failedUs), "lost", `Attempt ${attempt} failed`, failed);
	}
}

/** The transfers at their times, so that each lies under the chunk that hid it. */
function transferLane({ blocks_moved: moved, bytes_moved: size }, { prefill, decode }, lane, add) {
	const { writes, chunks } = prefill;
	if (!writes.length) return;
	const rows = stacked(writes);
	lane("KV transfer", prefill.path || prefill.transport, Math.max(24, (Math.max(...rows) + 1) * 16 + 4));
	const lastChunk = chunks.at(-1)?.[1] ?? 0;
	writes.forEach(([post, done, blocks, chunk], i) => {
		const part = moved ? (blocks * size) / moved : 0;
		const rate = done > post ? `, ${linkRate((part * 1e6) / (done - post))}` : "";
		const middle = Math.min(done, Math.max(post, lastChunk)); // from here on no chunk hides it
		const open = done > middle ? `${ms((done - middle) / 1000)} of it no chunk hid` : "a chunk hid all of it";
		const name = `Transfer of ${chunk < 0 ? "the cached blocks" : `chunk ${chunk + 1}`}`;
		const to = decode ? `to ${decode.worker_id}` : "";
		const rest = `${to}: ${count(blocks, "block")}, ${bytes(part)}${rate}; ${open}`;
		const shape = { dy: 3 + rows[i] * 16, height: WRITE_PX };
		const text = chunk < 0 ? "cached" : String(chunk + 1);
		const isHidden = middle > post || done === middle;
		if (isHidden) add(post, middle, "faint", name, rest, { ...shape, text, until: done });
		if (done > middle) {
			add(middle, done, "exposed", name, rest, isHidden ? shape : { ...shape, plate: text });
		}
	});
}

function decodeLane({ prefill, decode }, lane, add, scale) {
	const { worker_id: id, first_step_us: firstStep, chunks } = decode;
	lane(id, "decode", LANE_PX);
	const lastChunk = prefill?.chunks.at(-1)?.[1];
	if (firstStep > lastChunk) {
		const plate = `waits ${ms((firstStep - lastChunk) / 1000)}`;
		const rest = `${id} waits from the end of the last chunk until its first step with all blocks`;
		add(lastChunk, firstStep, "wait", "Handoff", rest, { plate });
	}
	if (!prefill && chunks.length) {
		add(decode.received_us, chunks[0][0], "wait", "Queue", `on ${id}`, { plate: "queue" });
		for (const [from, to, tokens] of chunks) {
			const text = `${int(tokens)} tok`;
			add(from, to, "prefill", "Local prefill", `of ${count(tokens, "token")} on ${id}`, { text });
		}
	}
	decodeSteps(decode, add, scale);
	for (const [from, to, reason] of decode.stalls) {
		add(from, to, "gap", "Gap", `on ${id}: ${reason}`, { plate: ms((to - from) / 1000) });
	}
}

/** Steps stay apart where there is room; where a step is narrower than a pixel, neighbours merge. */
function decodeSteps({ worker_id: id, steps }, add, scale) {
	const merged = [];
	let number = 0;
	for (const [from, to, batch, merges, tokens] of steps) {
		const open = merged.at(-1);
		number += merges;
		if (!open || (open.to - open.from) * scale >= 1 || from - open.to > GAP_US) {
			merged.push({ from, to, first: number - merges + 1, last: number, batch, tokens });
		} else {
			const most = Math.max(batch, open.batch);
			Object.assign(open, { to, last: number, batch: most, tokens: open.tokens + tokens });
		}
	}
	for (const { from, to, first, last, batch, tokens } of merged) {
		const inset = (to - from) * scale > 6 ? 0.75 / scale : 0;
		const beside = tokens ? `, beside ${count(tokens, "prompt token")} of other requests` : "";
		const name = first === last ? `Decode step ${first}` : `Decode steps ${first} to ${last}`;
		const text = first === last ? String(first) : "";
		add(from + inset, to - inset, "decode", name, `on ${id}, batch ${int(batch)}${beside}`, { text, until: to });
	}
}
