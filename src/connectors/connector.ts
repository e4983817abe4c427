import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import type { Api, BodyFacts } from '../core/facts.ts';
import type { Edits, ScannedObject } from '../core/json-scan.ts';
import type { Receiver } from '../core/receiver.ts';
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
  /** P renders the prompt itself, whatever ids it is given: it has media. */
  readonly isRendered: boolean;
}

/** Input for the body of a prefill leg. */
export interface PrefillContext {
  readonly api: Api;
  readonly facts: BodyFacts;
  /** Set for a warm leg. */
  readonly warm?: WarmHandle;
  readonly target: LegTarget;
  /** Token ids of the prompt that P is to use instead of rendering it; empty where they are not known. Not beside `warm`. */
  readonly promptTokenIds: readonly number[];
  /** P is to report the token ids that it used, for D. */
  readonly reportTokenIds: boolean;
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
 * One file and one line in `index.ts` each; what happens on the wire is done by the runner that it names.
 */
export type Connector = HandleConnector | FirstTokenConnector;

/** P's reply names the KV, and D is told that name. */
export interface HandleConnector {
  readonly runner: 'handles';
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

/** The client's request, for a connector that changes its API on the way. */
export interface ClientRequest {
  readonly api: Api;
  readonly facts: BodyFacts;
  readonly body: Uint8Array;
  readonly scan: ScannedObject;
}

/** A member that a connector's protocol cannot carry. */
export interface Uncarried {
  readonly param: string;
  /** Why, in words for the client. */
  readonly message: string;
}

/** How many tokens the client wants; `max` undefined: as many as fit. */
export type TokenLimits =
  | { readonly kind: 'ok'; readonly max: number | undefined; readonly min: number }
  /** Something that only an engine can judge. */
  | { readonly kind: 'odd' };

/** P generates the first token and writes its KV into a chosen D; D goes on from prompt and first token. */
export interface FirstTokenConnector {
  readonly runner: 'first-token';
  readonly name: string;
  /** The first member of the body that the protocol loses or falsifies. */
  readonly uncarried: (request: ClientRequest) => Uncarried | undefined;
  /** Members that could shape the prompt without `/tokenize` knowing, or that D may refuse and P is not shown: D then answers alone. */
  readonly unproven: (request: ClientRequest) => boolean;
  readonly readLimits: (request: ClientRequest) => TokenLimits;
  /** Alternatives a token that the client's log probabilities show. */
  readonly topLogprobs: (request: ClientRequest) => number;
  readonly stops: (request: ClientRequest) => readonly string[];
  /** Edits that make the client's body the prefill leg; `transferId` comes back in the notices. */
  readonly prefill: (
    request: ClientRequest,
    promptTokenIds: readonly number[],
    transferId: string,
    receiver: Receiver,
  ) => Edits;
  /** Edits that make the client's body the decode leg for what is left after the first token. */
  readonly decode: (
    request: ClientRequest,
    promptTokenIds: readonly number[],
    firstToken: number,
    max: number,
  ) => Edits;
  /** Edits that make the client's body a request that only takes the KV out of D's buffer. */
  readonly drain: (request: ClientRequest, promptTokenIds: readonly number[], firstToken: number) => Edits;
}
