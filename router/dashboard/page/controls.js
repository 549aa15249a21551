// How to change the fleet, and who changed what. Each change asks once and is logged.

import { Dialog } from "./dialog.js";
import { getJson, postJson, setKey } from "./live.js";
import { clock, DASH, int, kilo, known, ms, times } from "./numbers.js";
import { Card, Columns, Empty, html, KeyForm, Pool, State, Table, Tag, toast, useLoaded, useState } from "./parts.js";
import { hasNumbers, shownState } from "./workers.js";

const SHOWN_LOG = 10;
const TRACE_POLL_MS = 400;
const TRACE_POLLS = 50;
const WORDS = {
	local_prefill_threshold_tokens: ["Local prefill", "most tokens of a prompt that a decode worker prefills itself"],
	ttft_target_ms: ["Target: time to first token", "goodput counts requests that meet both targets"],
	tpot_target_ms: ["Target: time per output token", "goodput counts requests that meet both targets"],
	goodput_target: ["Target: goodput", "share of requests that are to meet both targets"],
	chunk_max_tokens: ["Prefill chunk budget", "most prompt tokens that a step computes"],
	itl_target_ms: ["Decode step target", "inter-token latency that chunks beside running decodes keep to"],
};

export function Controls({ live, fleet }) {
	const [count, setCount] = useState(0);
	const reload = () => setCount((now) => now + 1);
	const isOffered = fleet.offers?.includes("controls");
	const load = async (signal) => {
		const read = (name) => getJson(`control/${name}`, signal);
		const [settings, log, key] = await Promise.all([read("settings"), read("log"), read("key")]);
		return { settings, log, key: key.name };
	};
	const { value, error } = useLoaded(isOffered && live.mayControl ? load : async () => null, [count, live.mayControl]);
	const [question, ask] = useState(null);
	if (!isOffered) return html`<${Empty} title="No controls">This router does not offer controls.<//>`;
	if (!live.mayControl || error?.status === 401) {
		return html`<${Unlock} reason=${live.mayControl ? error?.message : ""} onUnlock=${() => ((live.mayControl = true), reload())} />`;
	}
	const lock = () => {
		setKey("");
		live.mayControl = false;
		live.retry();
	};
	const act = async (path, body, done) => {
		try {
			const answer = await postJson(`control/${path}`, body);
			toast(answer.reason ? `Refused: ${answer.reason}` : done);
		} catch (failed) {
			toast(failed.message);
		}
		reload();
	};
	const shared = { live, fleet, act, ask };
	return html`<div class="page-h">
			<h1>Controls</h1>
			<p>Unlocked with admin key <b>${value?.key ?? DASH}</b>, for this tab only. Each change asks once and is logged.</p>
			<button class="btn right" type="button" onClick=${lock}>Lock</button>
		</div>
		${error ? html`<div class="banner"><b>Not read.</b> ${error.message}</div>` : null}
		<div class="grid ctl">
			<div class="grid"><${Workers} ...${shared} /><${Log} entries=${value?.log ?? []} /></div>
			<div class="grid"><${Settings} ...${shared} settings=${value?.settings ?? []} /><${TestPrompt} ...${shared} reload=${reload} /></div>
		</div>
		${question
			? html`<${Dialog}
					...${question}
					onClose=${(isYes) => {
						ask(null);
						if (isYes) question.onYes();
					}}
				>${question.body}<//>`
			: null}`;
}

function Unlock({ reason, onUnlock }) {
	const onKey = (key) => {
		setKey(key);
		onUnlock();
	};
	return html`<section class="card empty">
		<h1>Controls need an admin key</h1>
		<p>${reason || "What changes the fleet asks for an admin key, also where reading does not. A router gets its keys by BATON_ADMIN_KEYS or --admin-key-file."}</p>
		<${KeyForm} label="Admin key" onKey=${onKey} />
	</section>`;
}

function Workers({ live, fleet, act, ask }) {
	const [busy, setBusy] = useState("");
	const change = async (worker, verb) => {
		setBusy(worker.worker_id);
		const answer = verb === "drain" ? await postJson("control/preview", { worker_id: worker.worker_id }).catch(() => null) : null;
		setBusy("");
		const { pressure = {} } = fleet;
		const predicted = answer?.predicted;
		const name = `${verb === "drain" ? "Drain" : "Resume"} ${worker.worker_id}`;
		const body = verb === "drain"
			? html`<p>It takes nothing new and finishes what it has; then it hands the rest over and ends. ${worker.role === "decode" ? "What it hands over moves to other decode workers with its KV blocks." : ""}</p>
				<${Prediction} now=${pressure} predicted=${predicted} />`
			: html`<p>It takes new requests again at once, if it has not ended yet.</p>`;
		const isShort = predicted && ["prefill", "decode"].some((role) => predicted[role] === null || predicted[role] > 1);
		const done = verb === "drain" ? `${worker.worker_id} is asked to drain` : `${worker.worker_id} is asked to go on`;
		ask({ title: `${name}?`, verb: name, isDanger: Boolean(isShort), body, onYes: () => act(verb, { worker_id: worker.worker_id }, done) });
	};
	const row = (worker) => {
		const { state, text } = shownState(worker, live.now());
		const left = hasNumbers(worker) ? (worker.num_waiting ?? 0) + (worker.num_running ?? 0) : null;
		const verb = { ready: "drain", draining: "resume" }[worker.state];
		return html`<tr>
			<th scope="row"><span class="named"><${Pool} role=${worker.role} />${worker.worker_id}</span></th>
			<td><${State} state=${state} text=${text} /></td>
			<td class="num">${int(left)}</td>
			<td class="num">
				${verb
					? html`<button class="btn" type="button" disabled=${busy === worker.worker_id} onClick=${() => change(worker, verb)}>
							${verb === "drain" ? "Drain" : "Resume"}<span class="sr"> ${worker.worker_id}</span>
						</button>`
					: html`<span class="faint small">${worker.state === "lost" ? "gone" : "not yet"}</span>`}
			</td>
		</tr>`;
	};
	const workers = [...fleet.workers].sort((a, b) => b.role.localeCompare(a.role));
	return html`<${Card} title="Workers" note="a drained worker takes nothing new, finishes what it has, hands over the rest">
		<${Table} label="Workers" extra="mid-rows" columns=${["worker", "state", ["requests", "num"], ["action", "num"]]}>${workers.map(row)}<//>
	<//>`;
}

function Prediction({ now, predicted }) {
	const word = (v) => (v === null ? "no worker left" : v > 1 ? `${times(v)}, short` : v > 0.9 ? `${times(v)}, tight` : times(v));
	return html`<table>
		<${Columns} names=${["pressure", ["now", "num"], ["predicted", "num"]]} />
		<tbody>
			${["prefill", "decode"].map((role) => {
				const after = predicted?.[role];
				const text = !predicted || (!known(now[role]) && after === null) ? DASH : word(after);
				return html`<tr><th scope="row">${role}</th><td class="num">${times(now[role])}</td><td class="num"><b>${text}</b></td></tr>`;
			})}
		</tbody>
	</table>`;
}

function Settings({ settings, act, ask }) {
	return html`<${Card} title="Budgets and targets" note="live; lost when the process restarts unless you set them there, too">
		${settings.map((each) => html`<${Field} key=${`${each.scope} ${each.name}`} setting=${each} act=${act} ask=${ask} />`)}
	<//>`;
}

function Field({ setting, act, ask }) {
	const { name, scope, value, unit } = setting;
	const [text, setText] = useState(null);
	const [title, what] = WORDS[name] ?? [name, ""];
	const shown = value === null ? "" : String(value);
	const given = (text ?? shown).replace(/,/g, "").trim();
	const isNew = given !== shown && given !== "" && Number.isFinite(Number(given));
	const change = () => {
		const body = html`<p><code>${name}</code> (${scope}): <b>${shown || DASH}</b> → <b>${given}</b> ${unit}</p>
			<p>It holds for new requests, and until the process restarts.</p>`;
		const onYes = async () => {
			await act("settings", { name, scope, value: Number(given) }, `${name} is ${given}`);
			setText(null);
		};
		ask({ title: `Change ${name}?`, verb: "Change", body, onYes });
	};
	return html`<div class="field">
		<label for=${`s-${name}-${scope}`}><b>${title}</b> <${Tag}>${scope}<//><span class="dim"><code>${name}</code>: ${what}</span></label>
		<span class="unit"><input id=${`s-${name}-${scope}`} type="text" inputmode="decimal" autocomplete="off" value=${text ?? shown} onInput=${(e) => setText(e.target.value)} />${unit}</span>
		<button class="btn" type="button" disabled=${!isNew} onClick=${change}>Change<span class="sr"> ${name} ${scope}</span></button>
	</div>`;
}

function Log({ entries }) {
	const row = (each) => html`<tr>
		<td class="faint nowrap">${clock(each.at_us)}</td><td class="nowrap">${each.key}</td>
		<td>${each.action}${each.new === null ? "" : ` ${each.old} → ${each.new}`}</td><td class="dim">${each.result}</td>
	</tr>`;
	const note = html`last ${Math.min(SHOWN_LOG, entries.length)} of ${entries.length}; all are in the router's log as <code>event=control</code>`;
	return html`<${Card} extra="audit" title="Audit log" note=${note}>
		${entries.length
			? html`<${Table} label="Audit log" columns=${["time", "key", "change", "result"]}>${entries.slice(0, SHOWN_LOG).map(row)}<//>`
			: html`<p class="dim">Nothing was changed since this router started.</p>`}
	<//>`;
}

function TestPrompt({ fleet, ask, reload }) {
	const [trace, setTrace] = useState(null);
	const ready = (role) => fleet.workers.filter((each) => each.role === role && each.state === "ready").map((each) => each.worker_id);
	const follow = async (id) => {
		for (let i = 0; i < TRACE_POLLS; i += 1) {
			const found = await getJson(`requests/${id}/trace`).catch(() => null);
			if (found) setTrace(found);
			if (found?.finished_us && (found.attempts.at(-1)?.decode?.finished_us || i > TRACE_POLLS / 2)) return;
			await new Promise((resolve) => setTimeout(resolve, TRACE_POLL_MS));
		}
	};
	const send = async (form) => {
		const chosen = (name) => form.elements[name].value || null;
		try {
			const body = { prompt: form.elements.prompt.value, max_tokens: 32, prefill: chosen("prefill"), decode: chosen("decode") };
			const { request_id: id } = await postJson("control/test", body);
			setTrace(null);
			reload();
			await follow(id);
		} catch (error) {
			toast(error.message);
		}
	};
	const onSubmit = (event) => {
		event.preventDefault();
		const form = event.target;
		const body = html`<p>It takes a place in the queue like any request, and at most 32 output tokens. Neither its text nor the answer is kept.</p>`;
		ask({ title: "Send a test prompt?", verb: "Send", body, onYes: () => send(form) });
	};
	const choice = (role) => html`<label class="small dim" for=${`t-${role}`}>${role}</label>
		<select id=${`t-${role}`} name=${role}><option value="">as placed</option>${ready(role).map((id) => html`<option value=${id}>${id}</option>`)}</select>`;
	return html`<${Card} title="Test prompt" note="billed to no client; left out of goodput">
		<form onSubmit=${onSubmit}>
			<label class="sr" for="t-prompt">Prompt</label>
			<textarea id="t-prompt" name="prompt" rows="2" required>Say in one sentence what a KV cache is.</textarea>
			<div class="pair">${choice("prefill")} ${choice("decode")}<button class="btn main">Send</button></div>
		</form>
		${trace ? html`<${Hops} trace=${trace} />` : null}
	<//>`;
}

/** The way of a test prompt, from the router to the last token. */
function Hops({ trace }) {
	const at = trace.attempts.at(-1);
	const { prefill, decode } = at ?? {};
	const last = (prefill ?? decode)?.chunks?.at(-1);
	const tokens = (prefill ?? decode)?.chunks?.reduce((all, each) => all + each[2], 0);
	const hops = [
		[trace.received_us, "", "router received it"],
		prefill && [prefill.received_us, "p", `${prefill.worker_id} queued it`],
		last && [last[1], "p", `${(prefill ?? decode).worker_id} computed ${kilo(tokens)} tokens`],
		prefill && decode?.blocks_arrived_us && [decode.blocks_arrived_us, "d", `${decode.worker_id} got ${int(trace.blocks_moved)} blocks`],
		trace.first_token_us && [trace.first_token_us, "", "first token sent"],
		trace.last_token_us && [trace.last_token_us, "d", `${int(trace.num_output_tokens)} tokens sent`],
	].filter(Boolean);
	return html`<ol class="hops" aria-label="Path of the last test prompt">
			${hops.map(([us, kind, text]) => html`<li class=${kind}><b>${ms((us - trace.received_us) / 1000)}</b>${text}</li>`)}
		</ol>
		<p class="small"><a href="#/requests/${encodeURIComponent(trace.request_id)}">Where every millisecond went</a></p>`;
}
