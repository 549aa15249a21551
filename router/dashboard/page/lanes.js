// Lays the spans of a trace out in lanes; pure. Times in the result are microseconds since the
// request arrived, places are pixels. A bar is as long as its span, at least one pixel.

import { bytes, int, ms, sig3 } from "./numbers.js";

const ROUTER_PX = 22;
const LANE_PX = 32;
const WRITE_PX = 13;
const GAP_US = 5000;
const FIRST_STEPS = 9;
const TOP = 44;

/** @typedef {{x: number, y: number, width: number, height: number, fill: string, text?: string,
 *   isPlate?: boolean, span?: {name: string, rest: string, from: number, to: number}}} Box */

/** Until when the range "First tokens" shows: the ninth decode step, or the end. */
export function rangeEnd(trace, isWhole) {
	const end = trace.end;
	if (isWhole || !trace.firstToken) return end;
	const steps = trace.attempts.at(-1)?.decode?.steps ?? [];
	const ninth = steps[Math.min(FIRST_STEPS, steps.length) - 1];
	const until = ninth ? ninth[1] : trace.firstToken * 1.25;
	return Math.max(1, Math.min(end, Math.max(until, trace.firstToken * 1.02)));
}

/** The trace with times since its arrival; null for what did not happen. */
export function relative(trace, nowUs) {
	const zero = trace.received_us;
	const since = (us) => (us ? us - zero : null);
	const spans = (list) => (list ?? []).map(([a, b, ...rest]) => [a - zero, b - zero, ...rest]);
	const attempts = trace.attempts.map((each) => ({
		...each,
		started: since(each.started_us),
		failedAt: since(each.failed_us),
		prefill: each.prefill && {
			...each.prefill,
			received: since(each.prefill.received_us),
			scheduled: since(each.prefill.scheduled_us),
			chunks: spans(each.prefill.chunks),
			waits: spans(each.prefill.waits),
			writes: spans(each.prefill.writes),
		},
		decode: each.decode && {
			...each.decode,
			received: since(each.decode.received_us),
			arrived: since(each.decode.blocks_arrived_us),
			firstStep: since(each.decode.first_step_us),
			chunks: spans(each.decode.chunks),
			steps: spans(each.decode.steps),
			stalls: spans(each.decode.stalls),
		},
	}));
	const lastToken = since(trace.last_token_us);
	return {
		tokenized: since(trace.tokenized_us),
		firstReceived: since(trace.first_token_received_us),
		firstToken: since(trace.first_token_us),
		lastToken,
		end: Math.max(1, since(trace.finished_us) ?? nowUs - zero, lastToken ?? 0),
		blockBytes: trace.blocks_moved ? trace.bytes_moved / trace.blocks_moved : 0,
		attempts,
	};
}

/** Rows for spans that overlap: each goes into the first row that is free at its start. */
export function stacked(spans) {
	const ends = [];
	return spans.map(([start, end]) => {
		let row = ends.findIndex((each) => each <= start);
		if (row < 0) row = ends.length;
		ends[row] = end;
		return row;
	});
}

/**
 * @returns {{height: number, boxes: Box[], lanes: {y: number, height: number, name: string,
 *   sub: string}[], heads: {y: number, text: string, isFailed: boolean}[],
 *   axis: {step: number, x: (us: number) => number}}}
 */
export function layOut(trace, { width, gutter, isWhole, isNarrow }) {
	const end = rangeEnd(trace, isWhole);
	const right = width - 10;
	const x = (us) => gutter + ((right - gutter) * us) / end;
	const out = { boxes: [], lanes: [], heads: [] };
	let y = TOP;
	const lane = (name, sub, height) => {
		if (isNarrow) y += 18;
		out.lanes.push({ y, height, name, sub });
	};
	const add = (from, to, fill, options = {}) => {
		if (from === null || to === null || from >= end || to < from) return;
		const at = x(from);
		const boxWidth = Math.max(1, x(Math.min(to, end)) - at);
		const { dy = 0, height = LANE_PX, text, isPlate, say } = options;
		const span = say && { name: say[0], rest: say[1] ?? "", from, to: options.until ?? to };
		out.boxes.push({ x: at, y: y + dy, width: boxWidth, height, fill, text, isPlate, span });
	};
	router(trace, { lane, add, isWhole });
	y += ROUTER_PX + 8;
	for (const attempt of trace.attempts) {
		if (trace.attempts.length > 1) {
			const failed = attempt.failed ? `, failed: ${attempt.failed}` : "";
			out.heads.push({ y: y + 14, text: `attempt ${attempt.attempt}${failed}`, isFailed: Boolean(failed) });
			y += 22;
		}
		if (attempt.prefill) {
			prefillLane(attempt, { lane, add });
			y += LANE_PX + 4;
			const rows = transferLane(trace, attempt, { lane, add });
			if (rows) y += rows + 4;
		}
		if (attempt.decode) {
			decodeLane(attempt, { lane, add, scale: (right - gutter) / end });
			y += LANE_PX + 4;
		}
		y += 4;
	}
	const sizes = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 60000];
	const step = sizes.find((each) => ((right - gutter) * each * 1000) / end > 74) ?? 120000;
	return { ...out, height: y + 2, axis: { step, x, end, right, top: TOP } };
}

function router(trace, { lane, add, isWhole }) {
	lane("router", "", ROUTER_PX);
	const options = (name, rest) => ({ height: ROUTER_PX, say: [name, rest] });
	const first = trace.attempts[0];
	add(0, trace.tokenized, "router", options("Receive and tokenise", "on the router"));
	if (first) add(trace.tokenized, first.started, "router", options("Place", "on the router"));
	trace.attempts.forEach((each, i) => {
		const next = trace.attempts[i + 1];
		if (each.failedAt !== null && next) {
			add(each.failedAt, next.started, "lost", options("Back-off", "before the next attempt"));
		}
	});
	if (trace.firstToken === null) return;
	const delivery = options("First token", "detokenised and sent to the client");
	add(trace.firstReceived, trace.firstToken, "router", delivery);
	if (isWhole && trace.lastToken > trace.firstToken) {
		const say = ["Tokens stream", "to the client"];
		add(trace.firstToken, trace.lastToken, "stream", { dy: 8, height: 6, say });
	}
}

function prefillLane(attempt, { lane, add }) {
	const { prefill } = attempt;
	const { worker_id: id, chunks } = prefill;
	lane(id, "prefill", LANE_PX);
	const queued = prefill.scheduled ?? chunks[0]?.[0] ?? null;
	if (queued !== null) {
		const text = `queue ${ms((queued - prefill.received) / 1000)}`;
		add(prefill.received, queued, "queue", { text, isPlate: true, say: ["Queue", `on ${id}`] });
	}
	const reasons = new Map(prefill.waits.map(([, to, reason]) => [to, reason]));
	chunks.forEach(([from, to, tokens], i) => {
		const before = chunks[i - 1]?.[1];
		if (before && from - before > GAP_US) {
			const reason = reasons.get(from) ?? "between two steps";
			add(before, from, "gap", { text: reason, isPlate: true, say: ["Wait between chunks", `on ${id}: ${reason}`] });
		}
		const say = [`Chunk ${i + 1}`, `on ${id}, ${int(tokens)} tokens`];
		add(from, to, "prefill", { text: [`${i + 1} · ${int(tokens)} tok`, `${i + 1}`], say });
	});
	if (attempt.failed && attempt.failedAt !== null) {
		const from = chunks.at(-1)?.[1] ?? queued ?? prefill.received;
		const say = [`Attempt ${attempt.attempt} failed`, attempt.failed];
		add(from, Math.max(from, attempt.failedAt), "lost", { say });
	}
}

/** The transfers at their times, so that each lies under the chunk that hid it; the lane's height. */
function transferLane(trace, attempt, { lane, add }) {
	const { prefill, decode } = attempt;
	if (!prefill.writes.length) return 0;
	const rows = stacked(prefill.writes);
	const height = Math.max(24, (Math.max(...rows) + 1) * 16 + 4);
	lane("KV transfer", prefill.path || prefill.transport, height);
	const lastChunk = prefill.chunks.at(-1)?.[1] ?? 0;
	prefill.writes.forEach(([post, done, blocks, chunk], i) => {
		const size = blocks * trace.blockBytes;
		const rate = done > post ? `, ${sig3(size / 1e9 / ((done - post) / 1e6))} GB/s` : "";
		const shown = Math.max(0, done - Math.max(post, lastChunk));
		const open = shown ? `${ms(shown / 1000)} of it no chunk hid` : "a chunk hid all of it";
		const what = chunk < 0 ? "the cached blocks" : `chunk ${chunk + 1}`;
		const to = decode ? ` to ${decode.worker_id}` : "";
		const say = [`Transfer of ${what}`, `${to.trim()}: ${int(blocks)} blocks, ${bytes(size)}${rate}; ${open}`];
		const at = { dy: 3 + rows[i] * 16, height: WRITE_PX, say };
		const name = chunk < 0 ? "cached" : String(chunk + 1);
		const middle = Math.min(done, Math.max(post, lastChunk));
		if (middle > post || !shown) add(post, middle, "hidden", { ...at, text: name, until: done });
		if (shown) {
			const plate = middle > post ? {} : { text: name, isPlate: true };
			add(middle, done, "exposed", { ...at, ...plate });
		}
	});
	return height;
}

function decodeLane(attempt, { lane, add, scale }) {
	const { prefill, decode } = attempt;
	const id = decode.worker_id;
	lane(id, "decode", LANE_PX);
	const lastChunk = prefill?.chunks.at(-1)?.[1] ?? null;
	if (lastChunk !== null && decode.firstStep > lastChunk) {
		const say = ["Handoff", `${id} waits from the end of the last chunk until its first step with all blocks`];
		const text = `waits ${ms((decode.firstStep - lastChunk) / 1000)}`;
		add(lastChunk, decode.firstStep, "wait", { text, isPlate: true, say });
	}
	if (!prefill && decode.chunks.length) {
		add(decode.received, decode.chunks[0][0], "wait", { text: "queue", isPlate: true, say: ["Queue", `on ${id}`] });
		decode.chunks.forEach(([from, to, tokens]) => {
			const say = ["Local prefill", `of ${int(tokens)} tokens on ${id}`];
			add(from, to, "prefill", { text: `${int(tokens)} tok`, say });
		});
	}
	decodeSteps(decode, add, scale);
	for (const [from, to, reason] of decode.stalls) {
		const text = ms((to - from) / 1000);
		add(from, to, "gap", { text, isPlate: true, say: ["Gap", `on ${id}: ${reason}`] });
	}
}

/** Steps stay apart where there is room; where a step is narrower than a pixel, neighbours merge. */
function decodeSteps(decode, add, scale) {
	const id = decode.worker_id;
	let number = 0;
	let open = null;
	const close = () => {
		if (!open) return;
		const { from, to, first, last, batch, tokens } = open;
		const width = (to - from) * scale;
		const inset = width > 6 ? 0.75 / scale : 0;
		const beside = tokens ? `, beside ${int(tokens)} prompt tokens of other requests` : "";
		const name = first === last ? `Decode step ${first}` : `Decode steps ${first} to ${last}`;
		const say = [name, `on ${id}, batch ${int(batch)}${beside}`];
		const text = first === last ? String(first) : "";
		add(from + inset, to - inset, "decode", { text, say, until: to });
		open = null;
	};
	for (const [from, to, batch, steps = 1, tokens = 0] of decode.steps) {
		const isFull = !open || (open.to - open.from) * scale >= 1 || from - open.to > GAP_US;
		if (isFull) {
			close();
			open = { from, to, first: number + 1, last: number + steps, batch, tokens };
		} else {
			open = { ...open, to, last: number + steps, batch: Math.max(batch, open.batch), tokens: open.tokens + tokens };
		}
		number += steps;
	}
	close();
}

/** The spans as events that Perfetto opens: one process per lane. */
export function perfetto(id, boxes, lanes) {
	const laneOf = (box) => lanes.findLastIndex((lane) => lane.y <= box.y);
	const names = lanes.map((lane, i) => ({
		ph: "M",
		name: "thread_name",
		pid: 1,
		tid: i,
		args: { name: `${lane.name} ${lane.sub}`.trim() },
	}));
	const spans = boxes
		.filter((box) => box.span)
		.map((box) => ({
			ph: "X",
			name: box.span.name,
			ts: box.span.from,
			dur: box.span.to - box.span.from,
			pid: 1,
			tid: laneOf(box),
			args: { what: box.span.rest },
		}));
	const process = { ph: "M", name: "process_name", pid: 1, args: { name: id } };
	return { traceEvents: [process, ...names, ...spans] };
}
