// The one dialog of the page: a confirmation, or the list of keys.

import { html, useEffect, useRef } from "./parts.js";

const KEYS = [
	[["1", "to", "5"], "Fleet, Requests, Doctor, Cache, Controls"],
	[["/"], "search by request id or key"],
	[["j", "k"], "next or previous request"],
	[["Esc"], "back to the list, close a dialog"],
	[["←", "→"], "step through a focused chart or waterfall"],
	[["z"], "first tokens or whole request"],
	[["c"], "copy the link to this view"],
	[["p"], "pause or resume updates"],
	[["t"], "theme: system, light, dark"],
	[["?"], "this list"],
];

export const isDialogOpen = () => document.querySelector("dialog")?.open;

/** An open dialog; `onClose` gets whether the reader chose the verb. */
export function Dialog({ verb, title = `${verb}?`, isDanger, onClose, children }) {
	const ref = useRef(null);
	useEffect(() => ref.current.showModal(), []);
	return html`<dialog
		ref=${ref}
		aria-labelledby="dialog-title"
		class=${isDanger ? "danger" : ""}
		onClose=${() => onClose(ref.current.returnValue === "yes")}
	>
		<form class="in" method="dialog">
			<h2 id="dialog-title">${title}</h2>
			${children}
			<div class="acts">
				<button class="btn" value="no" autofocus>${verb ? "Cancel" : "Close"}</button>
				${verb && html`<button class="btn ${isDanger ? "danger" : "main"}" value="yes">${verb}</button>`}
			</div>
		</form>
	</dialog>`;
}

export const KeysDialog = ({ areOn, onSwitch, onClose }) =>
	html`<${Dialog} title="Keyboard" onClose=${onClose}>
		<table>
			<tbody>
				${KEYS.map(
					([keys, text]) =>
						html`<tr>
							<td class="nowrap">${keys.map((each) => (each === "to" ? " to " : html`<kbd>${each}</kbd> `))}</td>
							<td>${text}</td>
						</tr>`,
				)}
			</tbody>
		</table>
		<p>
			<label class="check">
				<input type="checkbox" checked=${areOn} onChange=${(event) => onSwitch(event.target.checked)} />
				Single-key shortcuts
			</label>
		</p>
	<//>`;
