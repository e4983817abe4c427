import { parseJson } from '../../src/core/parse-json.ts';

/** Everything of a reply that must be the same whoever computed it, and the tokens where the engine was asked for them. */
export interface Substance {
  readonly text: string;
  readonly same: {
    readonly choices: readonly { text: string; calls: string; finish: unknown; stop: unknown; logprobs: unknown[] }[];
    readonly usage: unknown;
    readonly done: boolean;
  };
  readonly errors: readonly unknown[];
  /** Ids of the prompt and of the first choice. */
  readonly promptIds: readonly number[];
  readonly outputIds: readonly number[];
  /** The first choice ended with a stop string. */
  readonly endedByText: boolean;
}

interface Piece {
  readonly content?: string | null;
  readonly tool_calls?: readonly { readonly function: { readonly name?: string; readonly arguments?: string } }[];
}

interface RawReply {
  readonly error?: unknown;
  readonly prompt_token_ids?: readonly number[] | null;
  readonly choices?: readonly {
    readonly index: number;
    readonly text?: string;
    readonly delta?: Piece;
    readonly message?: Piece;
    readonly logprobs?: unknown;
    readonly finish_reason?: string | null;
    readonly stop_reason?: unknown;
    readonly token_ids?: readonly number[] | null;
    readonly prompt_token_ids?: readonly number[] | null;
  }[];
  readonly usage?: Readonly<Record<string, unknown>> | null;
}

/** Reads a whole reply, streamed or not. */
export function readSubstance(raw: string, stream: boolean): Substance {
  const replies = stream
    ? raw.split('\n\n').flatMap((event) => (event.startsWith('data: {') ? [parseJson(event.slice(6)) as RawReply] : []))
    : [parseJson(raw) as RawReply];
  const choices: Substance['same']['choices'][number][] = [];
  const errors: unknown[] = [];
  const outputIds: number[] = [];
  let promptIds: readonly number[] = [];
  let usage: unknown;
  for (const reply of replies) {
    if (reply.error !== undefined) errors.push(reply.error);
    promptIds = reply.prompt_token_ids ?? promptIds;
    if (reply.usage) {
      const { prompt_tokens, completion_tokens, total_tokens } = reply.usage;
      usage = { prompt_tokens, completion_tokens, total_tokens };
    }
    for (const choice of reply.choices ?? []) {
      const piece = choice.delta ?? choice.message;
      const known = choices[choice.index] ?? { text: '', calls: '', finish: null, stop: null, logprobs: [] };
      choices[choice.index] = known;
      known.text += piece?.content ?? choice.text ?? '';
      for (const call of piece?.tool_calls ?? []) {
        known.calls += (call.function.name ?? '') + (call.function.arguments ?? '');
      }
      if (choice.logprobs) known.logprobs.push(choice.logprobs);
      known.finish = choice.finish_reason ?? known.finish;
      known.stop = choice.stop_reason ?? known.stop;
      if (choice.index !== 0) continue;
      outputIds.push(...(choice.token_ids ?? []));
      promptIds = choice.prompt_token_ids ?? promptIds;
    }
  }
  const [first] = choices;
  const endedByText = typeof first?.stop === 'string';
  return {
    text: first === undefined ? '' : first.text + first.calls,
    same: { choices, usage, done: !stream || raw.endsWith('data: [DONE]\n\n') },
    errors,
    promptIds,
    outputIds,
    endedByText,
  };
}
