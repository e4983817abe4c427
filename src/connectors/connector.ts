import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import type { Api, BodyFacts } from '../core/facts.ts';
import type { Edits } from '../core/json-scan.ts';
import type { RemoteHostRule } from '../core/remote-host.ts';

/** What a connector may know about an instance that a leg goes to. */
export interface LegTarget {
  readonly instanceId: string;
  /** Base URL of the engine's HTTP server. */
  readonly url: string;
  /** Tokens per KV block; 0 while unknown. */
  readonly blockSize: number;
  /** Fingerprint of tokenizer and chat template; empty while unknown. */
  readonly templateFingerprint: string;
}

/** An earlier turn's handle on its way to P, and the prompt that was compared with it. */
export interface WarmHandle {
  readonly params: KvTransferParams;
  /** Token ids of the whole prompt; empty where nothing was compared (the unsafe guard modes). */
  readonly promptTokenIds: readonly number[];
}

/** Input for the body of a prefill leg. */
export interface PrefillContext {
  readonly api: Api;
  readonly facts: BodyFacts;
  /** Set for a warm leg. */
  readonly warm?: WarmHandle;
  readonly target: LegTarget;
  /** True when the body carries `max_completion_tokens`, which engines prefer to `max_tokens`. */
  readonly hasMaxCompletionTokens: boolean;
}

/** Input for reading P's reply. */
export interface PrefillReplyContext {
  readonly prefill: LegTarget;
  readonly decode: LegTarget;
  readonly remoteHost: RemoteHostRule;
}

/** A handle that passed every check, ready to be sent. */
export interface CheckedHandle {
  /** JSON text of the `kv_transfer_params` member, P's own bytes wherever nothing had to change. */
  readonly json: Uint8Array;
  readonly params: KvTransferParams;
}

/** Input for the body of a decode leg. */
export interface DecodeContext {
  readonly api: Api;
  readonly handle: CheckedHandle;
  /** Token ids of the prompt where they are known: D must not render a longer prompt than P did. */
  readonly promptTokenIds: readonly number[];
  /** Ask for the token ids of prompt and reply, so that D's own handle can be stored with a proof. */
  readonly captureTokens: boolean;
}

/** What P's reply offered. */
export type PrefillReading =
  | { readonly kind: 'handle'; readonly handle: CheckedHandle }
  /** Nothing to hand over (`absent`) or something that would kill or mislead D (`malformed_…`): D runs alone. */
  | { readonly kind: 'none'; readonly reason: string };

/**
 * How one engine connector hands KV over: pure functions from facts and replies to the edits of a leg's body.
 * One file and one line in `index.ts` each; what happens on the wire is done by the caller.
 */
export interface Connector {
  readonly name: string;
  /** `prefill-then-decode`: D's leg needs P's reply; `aggregated`: there is one leg and nothing is handed over. */
  readonly order: 'prefill-then-decode' | 'aggregated';
  /** Whether D's reply may carry a handle for the next turn's P. */
  readonly returnsHandles: boolean;
  /** What ends P's hold when the client leaves between the legs; `lease`: nothing has to be sent. */
  readonly clientGoneBetweenLegs: 'lease';
  /** Edits that make the client's body a prefill leg. */
  readonly prefill: (context: PrefillContext) => Edits;
  /** Reads and checks the raw `kv_transfer_params` of P's reply (undefined: the reply has none). */
  readonly readPrefillReply: (raw: Uint8Array | undefined, context: PrefillReplyContext) => PrefillReading;
  /** Edits that make the client's body the decode leg for a handle. */
  readonly decode: (context: DecodeContext) => Edits;
}
