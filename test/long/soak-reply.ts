import { parseJson } from '../../src/core/parse-json.ts';

/** A reply as a chat client reads it. */
export interface Spoken {
  readonly thought: string;
  readonly text: string;
  readonly calls: readonly { id: string; type: string; function: { name: string; arguments: string } }[];
  readonly errors: readonly unknown[];
  /** What must be the same whoever computed it. */
  readonly same: unknown;
}

interface Call {
  readonly index?: number;
  readonly id?: string;
  readonly function: { readonly name?: string; readonly arguments?: string };
}

interface Piece {
  readonly content?: string | null;
  readonly reasoning?: string | null;
  readonly tool_calls?: readonly Call[];
}

interface Raw {
  readonly error?: unknown;
  readonly choices?: readonly {
    readonly delta?: Piece;
    readonly message?: Piece;
    readonly logprobs?: unknown;
    readonly finish_reason?: string | null;
    readonly stop_reason?: unknown;
  }[];
  readonly usage?: Readonly<Record<string, unknown>> | null;
}

/** Reads a whole reply, streamed or not, with reasoning and calls of tools. */
export function readSpoken(raw: string, stream: boolean): Spoken {
  const replies = stream
    ? raw.split('\n\n').flatMap((event) => (event.startsWith('data: {') ? [parseJson(event.slice(6)) as Raw] : []))
    : [parseJson(raw) as Raw];
  const errors: unknown[] = [];
  const logprobs: unknown[] = [];
  const calls: { id: string; type: string; function: { name: string; arguments: string } }[] = [];
  let thought = '';
  let text = '';
  let finish: unknown = null;
  let stop: unknown = null;
  let usage: unknown;
  for (const reply of replies) {
    if (reply.error !== undefined) errors.push(reply.error);
    if (reply.usage) {
      const { prompt_tokens, completion_tokens } = reply.usage;
      usage = { prompt_tokens, completion_tokens };
    }
    for (const choice of reply.choices ?? []) {
      const piece = choice.delta ?? choice.message;
      thought += piece?.reasoning ?? '';
      text += piece?.content ?? '';
      for (const call of piece?.tool_calls ?? []) {
        const at = call.index ?? 0;
        const known = calls[at] ?? { id: '', type: 'function', function: { name: '', arguments: '' } };
        calls[at] = known;
        known.id += call.id ?? '';
        known.function.name += call.function.name ?? '';
        known.function.arguments += call.function.arguments ?? '';
      }
      if (choice.logprobs) logprobs.push(choice.logprobs);
      finish = choice.finish_reason ?? finish;
      stop = choice.stop_reason ?? stop;
    }
  }
  const done = !stream || raw.endsWith('data: [DONE]\n\n');
  return { thought, text, calls, errors, same: { thought, text, calls, finish, stop, logprobs, usage, done } };
}
