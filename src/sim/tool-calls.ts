import { drawFrom, type HashState, toHex } from './hash.ts';
import type { ForcedTools } from './parse-request.ts';
import type { ForcedToken } from './sequence.ts';
import { encodeText, type TokenizerKind } from './tokenizer.ts';

const letters = 8;

/** The tool call of one choice, decided by its KV content when decoding starts. */
export interface PlannedCall {
  readonly id: string;
  readonly name: string;
  /** Tokens to force, and where the arguments lie in their text. */
  readonly tokens: readonly ForcedToken[];
  readonly argumentsFrom: number;
  readonly argumentsTo: number;
}

/** Plans a call: the name by the KV content, the argument's letters token by token. */
export function planCall(tools: ForcedTools, state: HashState, salt: number, kind: TokenizerKind): PlannedCall {
  const name = tools.names[drawFrom(state, salt ^ 0x746f6f6c) % tools.names.length] ?? '';
  const before = tools.isNamed ? '' : `[{"name":${JSON.stringify(name)},"parameters":`;
  const after = tools.isNamed ? '' : '}]';
  const open = '{"input":"';
  const close = '"}';
  const tokens: ForcedToken[] = [
    ...encodeText(before + open, kind),
    ...Array.from({ length: letters }, (): ForcedToken => 'letter'),
    ...encodeText(close + after, kind),
  ];
  const argumentsTo = before.length + open.length + letters + close.length;
  return { id: `chatcmpl-tool-${toHex(state)}`, name, tokens, argumentsFrom: before.length, argumentsTo };
}

/** The part of the arguments between two lengths of the generated text. */
export function sliceArguments(call: PlannedCall, text: string, from: number, to: number): string {
  return text.slice(Math.max(from, call.argumentsFrom), Math.min(to, call.argumentsTo));
}
