// How to change the fleet, and who changed what. Each change asks once and is logged.

import { Dialog } from "./dialog.js";
import { getJson, postJson, setKey } from "./live.js";
import { clock, count, DASH, int, known, ms, times } from "./numbers.js";
import { Card, html, KeyForm, Named, PlainTable, State, Table, Tag, toast, told, useLoaded, useState } from "./parts.js";
import { isOver, linkTo } from "./requests.js";
import { hasNumbers, requestsOf, shownState } from "./workers.js";

const SHOWN_LOG = 10;
const TRACE_POLL_MS = 400;

export function Controls({ live, fleet }) {
	const [version, setVersion] = useState(0);
	const reload = () => setVersion((now) => now + 1);
	const load = async (signal) => {
		if (!live.mayControl) return {};
		const read = (name) => getJson(`control/${name}`, signal);
		const [settings, log, key] = await Promise.all([read("settings"), read("log"), read("key")]);
		return { settings, log, key: key.name };
	};
	const { value, error } = useLoaded(load, [version, live.mayControl]);
	const [question, ask] = useState(null);
	if (!live.mayControl || error?.status === 401) {
		const onKey = () => {
			live.mayControl = true;
			reload();
		};
		const reason =
			(live.mayControl && error?.message) ||
			"What changes the fleet asks for an admin key, also where reading does not. A router gets its keys by BATON_ADMIN_KEYS or --admin-key-file.";
		return html`<${KeyForm} title="Controls need an admin key" reason=${reason} label="Admin key" onKey=${onKey} />`;
	}
	const onLock = () => {
		setKey("");
		live.mayControl = false;
		live.retry();
	};
	const act = async (path, body, done) => {
		await told(postJson(`control/${path}`, body), ({ reason }) => (reason ? `Refused: ${reason}` : done));
		reload();
	};
	const onClose = (isYes) => {
		ask(null);
		if (isYes) question.onYes();
	};
	const { key = DASH, log = [], settings = [] } = value ?? {};
	return html`<div class="page-h">
			<h1>Controls</h1>
			<p>Unlocked with admin key <b>${key}</b>, for this tab only. Each change asks once and is logged.</p>
			<button class="btn right" onClick=${onLock}>Lock</button>
		</div>
		${error && html`<div class="banner"><b>Not read.</b> ${error.message}</div>`}
		<div class="grid ctl">
			<div class="grid"><${Workers} ...${{ live, fleet, act, ask }} /><${Log} entries=${log} /></div>
			<div class="grid"><${Settings} ...${{ settings, act, ask }} /><${TestPrompt} ...${{ fleet, live, ask, reload }} /></div>
		</div>
		${question && html`<${Dialog} ...${question} onClose=${onClose}>${question.body}<//>`}`;
}

function Workers({ live, fleet, act, ask }) {
	const [busy, setBusy] = useState("");
	const onDrain = async ({ worker_id: id, role }) => {
		setBusy(id);
		const answer = await postJson("control/preview", { worker_id: id }).catch(() => null);
		setBusy("");
		const predicted = answer?.predicted;
		const moves = role === "decode" && "What it hands over moves to other decode workers with its KV blocks.";
		ask({
			verb: `Drain ${id}`,
			isDanger: Object.values(predicted ?? {}).some((each) => each === null || each > 1),
			body: html`<p>It takes nothing new and finishes what it has; then it hands the rest over and ends. ${moves}</p>
				<${Prediction} now=${fleet.pressure} predicted=${predicted} />`,
			onYes: () => act("drain", { worker_id: id }, `${id} is asked to drain`),
		});
	};
	const onResume = ({ worker_id: id }) =>
		ask({
			verb: `Resume ${id}`,
			body: html`<p>It takes new requests again at once, if it has not ended yet.</p>`,
			onYes: () => act("resume", { worker_id: id }, `${id} is asked to go on`),
		});
	const row = (worker) => {
		const { worker_id: id, role } = worker;
		const [verb, onClick] = { ready: ["Drain", onDrain], draining: ["Resume", onResume] }[worker.state] ?? [];
		const button = html`<button class="btn" disabled=${busy === id} onClick=${() => onClick(worker)}>
			${verb}<span class="sr"> ${id}</span>
		</button>`;
		return [
			html`<${Named} role=${role} id=${id} />`,
			html`<${State} ...${shownState(worker, live.now())} />`,
			int(hasNumbers(worker) ? requestsOf(worker) : null),
			verb ? button : html`<span class="faint small">${worker.state === "lost" ? "gone" : "not yet"}</span>`,
		];
	};
	const rows = fleet.workers.toSorted((a, b) => b.role.localeCompare(a.role)).map(row);
	const columns = ["worker", "state", ["requests", "num"], ["action", "num"]];
	return html`<${Card} title="Workers" note="a drained worker takes nothing new, finishes what it has, hands over the rest">
		<${Table} label="Workers" extra="mid-rows" columns=${columns} rows=${rows} />
	<//>`;
}

function Prediction({ now, predicted }) {
	const word = (v) => (v === null ? "no worker left" : times(v) + (v > 1 ? ", short" : v > 0.9 ? ", tight" : ""));
	const rows = ["prefill", "decode"].map((role) => {
		const after = predicted?.[role];
		const isKnown = predicted && (known(now[role]) || after !== null);
		return [role, times(now[role]), html`<b>${isKnown ? word(after) : DASH}</b>`];
	});
	return html`<${PlainTable} columns=${["pressure", ["now", "num"], ["predicted", "num"]]} rows=${rows} />`;
}

const Settings = ({ settings, act, ask }) =>
	html`<${Card} title="Budgets and targets" note="live; lost when the process restarts unless you set them there, too">
		${settings.map((each) => html`<${Field} key="${each.scope} ${each.name}" ...${each} act=${act} ask=${ask} />`)}
	<//>`;

function Field({ name, scope, value, unit, title, text: what, act, ask }) {
	const [text, setText] = useState(null);
	const shown = String(value ?? "");
	const given = (text ?? shown).replace(/,/g, "").trim();
	const isNew = given !== shown && given !== "" && Number.isFinite(Number(given));
	const onChange = () =>
		ask({
			title: `Change ${name}?`,
			verb: "Change",
			body: html`<p><code>${name}</code> (${scope}): <b>${shown || DASH}</b> → <b>${given}</b> ${unit}</p>
				<p>It holds for new requests, and until the process restarts.</p>`,
			onYes: async () => {
				await act("settings", { name, scope, value: Number(given) }, `${name} is ${given}`);
				setText(null);
			},
		});
	const id = `s-${name}-${scope}`;
	const onInput = (event) => setText(event.target.value);
	return html`<div class="field">
		<label for=${id}><b>${title}</b> <${Tag}>${scope}<//><span class="dim"><code>${name}</code>: ${what}</span></label>
		<span class="unit">
			<input id=${id} inputmode="decimal" autocomplete="off" value=${text ?? shown} onInput=${onInput} />${unit}
		</span>
		<button class="btn" disabled=${!isNew} onClick=${onChange}>Change<span class="sr"> ${name} ${scope}</span></button>
	</div>`;
}

function Log({ entries }) {
	const row = ({ at_us, key, action, old, new: next, result }) => {
		const change = next === null ? action : `${action} ${old} → ${next}`;
		return [clock(at_us), key, change, html`<span class="dim">${result}</span>`];
	};
	const columns = [["time", "faint nowrap"], ["key", "nowrap"], "change", "result"];
	const shown = entries.slice(0, SHOWN_LOG);
	const note = html`last ${shown.length} of ${entries.length}; all are in the router's log as <code>event=control</code>`;
	return html`<${Card} extra="audit" title="Audit log" note=${note}>
		${shown.length
			? html`<${Table} label="Audit log" columns=${columns} rows=${shown.map(row)} />`
			: html`<p>Nothing was changed since this router started.</p>`}
	<//>`;
}

function TestPrompt({ fleet, live, ask, reload }) {
	const [id, setId] = useState("");
	const load = async (signal) => id && getJson(`requests/${id}/trace`, signal);
	const isDone = (found) => isOver(found, live.now()) || (found.finished_us && found.attempts.at(-1)?.decode?.finished_us);
	const { value: trace } = useLoaded(load, [id], (found) => id && !(found && isDone(found)) && TRACE_POLL_MS);
	const send = async ({ prompt, prefill, decode }) => {
		const chosen = { prefill: prefill.value || null, decode: decode.value || null };
		try {
			const { request_id } = await postJson("control/test", { prompt: prompt.value, max_tokens: 32, ...chosen });
			setId(request_id);
			reload();
		} catch (error) {
			toast(error.message);
		}
	};
	const onSubmit = (event) => {
		event.preventDefault();
		const { elements } = event.target;
		ask({
			title: "Send a test prompt?",
			verb: "Send",
			body: html`<p>
				It takes a place in the queue like any request, and at most 32 output tokens. Neither its text nor the answer is kept.
			</p>`,
			onYes: () => send(elements),
		});
	};
	const choice = (role) => {
		const ready = fleet.workers.filter((each) => each.role === role && each.state === "ready");
		return html`<label class="small dim" for="t-${role}">${role}</label>
			<select id="t-${role}" name=${role}>
				<option value="">as placed</option>
				${ready.map(({ worker_id: id }) => html`<option value=${id}>${id}</option>`)}
			</select>`;
	};
	return html`<${Card} title="Test prompt" note="billed to no client; left out of goodput">
		<form onSubmit=${onSubmit}>
			<label class="sr" for="t-prompt">Prompt</label>
			<textarea id="t-prompt" name="prompt" required>Say in one sentence what a KV cache is.</textarea>
			<div class="pair">${choice("prefill")} ${choice("decode")}<button class="btn main">Send</button></div>
		</form>
		${trace &&
		html`<p class="hops">
			${trace.outcome}: first token after ${ms(trace.ttft_ms)}, then ${count(trace.num_output_tokens, "token")}.
			<a href=${linkTo(trace.request_id)}>Where every millisecond went</a>
		</p>`}
	<//>`;
}
