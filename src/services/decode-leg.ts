import type { IncomingHttpHeaders } from 'node:http';
import { DONE_EVENT, describeEngineError, errorEvent, maskMessage, type OpenAiError } from '../core/openai-error.ts';
import { isPlainEvent } from '../core/plain-event.ts';
import { type EventFacts, type MuteSpec, muteEvent, muteReply, readEvent, readReply } from '../core/reply.ts';
import { dataLines, SseSplitter } from '../core/sse.ts';
import { isSameIds } from '../core/token-ids.ts';
import type { EngineClient, LegControl, LegFailure, LegRequest } from '../engine/client.ts';
import type { DurationCounter } from '../obs/duration-histogram.ts';
import type { ClientSink } from './client-sink.ts';
import {
  classifyError,
  classifyStatus,
  concat,
  connectionFailure,
  type FailedLeg,
  type GoneLeg,
  HEALTH_LOOK_MS,
  type LegAuth,
  MAX_WHOLE_REPLY,
  ownRefusal,
  type RefusedLeg,
  timeoutFailure,
} from './leg.ts';
import { type ReplyFacts, ReplyNotes } from './reply-facts.ts';
import { PASSED_ON, replyHeaders, STREAM_HEADERS } from './reply-headers.ts';

/** The reply is with the client, whole. */
export interface RelayedLeg {
  readonly kind: 'relayed';
  readonly facts: ReplyFacts;
}

/** The reply broke after its first content; the client was told in the stream. */
export interface BrokenLeg {
  readonly kind: 'broken';
  readonly reason: 'reset' | 'idle' | 'cut' | 'engine_error';
  readonly facts: ReplyFacts;
}

export type DecodeResult = RelayedLeg | BrokenLeg | FailedLeg | RefusedLeg | GoneLeg;

/** Limits of a decode leg; times in milliseconds, 0 = none. */
export interface DecodeLegOptions {
  readonly auth: LegAuth;
  readonly mute: MuteSpec;
  /** Turns the engine's reply into the client's, for connectors that change the API; by default they are the same. */
  readonly reshape?: ReplyReshaper;
  /** Writes the engine's whole reply as the stream that the client asked for; undefined where it is none that is known. */
  readonly toStream?: (body: Uint8Array) => Uint8Array | undefined;
  /** Keep the token ids of prompt and reply. */
  readonly captureTokens: boolean;
  /** Headers baton adds to the reply; they win over the engine's. */
  readonly headers: Readonly<Record<string, string>>;
  readonly firstContentMs: number;
  readonly wholeReplyMs: number;
  readonly idleMs: number;
  /** Whether the client asked for a stream; decides which of the two limits above waits for the reply's start. */
  readonly streamed: boolean;
  /** The reply has several choices: one that never began cannot be told from none, so only `[DONE]` ends it well. */
  readonly severalChoices: boolean;
  readonly holdBytes: number;
  readonly bufferBytes: number;
  /** True when the engine has failed its health checks for so long that waiting for it is hopeless. */
  readonly isHopeless: () => boolean;
  /** True when the engine may have read its prompt's KV after that was gone; asked before anything is shown. Default never. */
  readonly isDoubtful?: () => boolean;
  /** The prompt whose KV D was given: a reply to another one is not shown. Default: it is not known, or not told. */
  readonly promptTokenIds?: readonly number[];
  /** Told of every piece of the reply: the engine is alive, however slow its health route is. */
  readonly onProgress: () => void;
  /** Told when the reply's head is there. */
  readonly onHead: () => void;
  /** Where the times between the pieces of a stream are counted. */
  readonly gaps: DurationCounter;
  readonly now: () => number;
}

/** What a reply goes through before anything else looks at it. */
export interface ReplyReshaper {
  readonly event: (event: Uint8Array) => Uint8Array;
  readonly whole: (body: Uint8Array) => Uint8Array;
}

/** An event is kept until its blank line arrives; a larger one is a fault of the engine. */
const MAX_EVENT_BYTES = 64 * 1024 * 1024;

/**
 * Runs a decode leg and relays its reply. Status and head of a stream are held until the first event with content, so
 * that a failure before it is the caller's to repair; from then on every event goes out as it arrives.
 */
export function runDecodeLeg(
  engines: EngineClient,
  request: LegRequest,
  sink: ClientSink,
  options: DecodeLegOptions,
): Promise<DecodeResult> {
  if (sink.signal.aborted) return Promise.resolve({ kind: 'gone' });
  return new Promise((resolve, reject) => {
    new DecodeLeg(sink, options, resolve, reject).start(engines, request);
  });
}

const encoder = new TextEncoder();

/** Events as one piece of bytes; those that one read brought lie side by side and are not copied. */
function joined(events: readonly Uint8Array[], from: number, to: number): Uint8Array {
  const first = events[from];
  if (first === undefined || to === from + 1) return first ?? new Uint8Array();
  let end = first.byteOffset;
  let size = 0;
  let isOneView = true;
  for (let at = from; at < to; at++) {
    const event = events[at];
    if (event === undefined) break;
    if (event.buffer !== first.buffer || event.byteOffset !== end) isOneView = false;
    end = event.byteOffset + event.byteLength;
    size += event.byteLength;
  }
  return isOneView ? new Uint8Array(first.buffer, first.byteOffset, size) : concat(events.slice(from, to), size);
}

class DecodeLeg {
  readonly #sink: ClientSink;
  readonly #options: DecodeLegOptions;
  readonly #resolve: (result: DecodeResult) => void;
  readonly #reject: (error: unknown) => void;
  readonly #splitter = new SseSplitter();
  #control: LegControl | undefined;
  #status = 0;
  #headers: IncomingHttpHeaders = {};
  #mode: 'head' | 'whole' | 'held' | 'open' = 'head';
  /** Pieces of a whole reply, or held events. */
  #kept: Uint8Array[] = [];
  #keptBytes = 0;
  readonly #notes: ReplyNotes;
  #erred = false;
  #contentAt = 0;
  /** When the latest piece of an open stream came; 0 where the time to the next one is not the engine's. */
  #pieceAt = 0;
  #pausedAt = 0;
  #pausedMs = 0;
  #limit: 'timeout' | 'idle' | 'unhealthy' | undefined;
  #waiting: NodeJS.Timeout | undefined;
  /** The limit whose time runs. */
  #waitsFor: 'timeout' | 'idle' | undefined;
  #health: NodeJS.Timeout | undefined;
  #paused = false;
  #settled = false;
  readonly #leave = () => this.#control?.abort(new Error('the client left'));

  constructor(
    sink: ClientSink,
    options: DecodeLegOptions,
    resolve: (result: DecodeResult) => void,
    reject: (error: unknown) => void,
  ) {
    this.#sink = sink;
    this.#options = options;
    this.#notes = new ReplyNotes(options.captureTokens);
    this.#resolve = resolve;
    this.#reject = reject;
  }

  start(engines: EngineClient, request: LegRequest): void {
    const { streamed, firstContentMs, wholeReplyMs, isHopeless } = this.#options;
    this.#control = engines.send(request, {
      head: (status, headers) => this.#safely(() => this.#onHead(status, headers)),
      data: (chunk) => this.#safely(() => this.#onData(chunk)),
      end: () => this.#safely(() => this.#onEnd()),
      fail: (failure) => this.#safely(() => this.#onFail(failure)),
    });
    // The client library may have failed the leg while it took it.
    if (this.#settled) return;
    this.#sink.signal.addEventListener('abort', this.#leave, { once: true });
    this.#arm(streamed ? firstContentMs : wholeReplyMs, 'timeout');
    this.#health = setInterval(() => {
      if (isHopeless()) this.#giveUp('unhealthy');
    }, HEALTH_LOOK_MS);
  }

  /** A fault of this code must end the request: the HTTP client would swallow it, and the client would wait. */
  #safely(handle: () => void): void {
    try {
      handle();
    } catch (error) {
      this.#end();
      this.#reject(error);
      this.#control?.abort(new Error('the reply could not be handled'));
    }
  }

  #onHead(status: number, headers: IncomingHttpHeaders): void {
    this.#options.onHead();
    this.#status = status;
    this.#headers = headers;
    const isStream = /^text\/event-stream\b/i.test(headers['content-type'] ?? '');
    this.#mode = isStream && status >= 200 && status < 300 ? 'held' : 'whole';
  }

  #onData(chunk: Uint8Array): void {
    this.#options.onProgress();
    if (this.#mode === 'whole') {
      this.#kept.push(chunk);
      this.#keptBytes += chunk.byteLength;
      if (this.#keptBytes > MAX_WHOLE_REPLY) this.#control?.abort(new Error('the reply is too large'));
      return;
    }
    const events = this.#splitter.push(chunk);
    for (let at = 0; at < events.length; ) {
      const plain = this.#relayPlain(events, at);
      at += plain;
      const event = plain > 0 ? undefined : events[at++];
      if (event !== undefined && !this.#onEvent(event)) return;
    }
    if (this.#splitter.pendingBytes > MAX_EVENT_BYTES) {
      this.#control?.abort(new Error('an event of the engine is too large'));
      return;
    }
    if (this.#mode !== 'open') return;
    this.#countGap();
    this.#arm(this.#options.idleMs, 'idle');
    this.#slowDown();
  }

  /** Passes on events from a place on of which nothing is to be noted, as one piece; says how many. */
  #relayPlain(events: readonly Uint8Array[], from: number): number {
    const { reshape, severalChoices } = this.#options;
    if (this.#mode !== 'open' || reshape !== undefined || severalChoices || !this.#notes.hasBegun) return 0;
    let to = from;
    for (let event = events[to]; event !== undefined && isPlainEvent(event); event = events[to]) to++;
    if (to > from) this.#sink.write(joined(events, from, to), to - from);
    return to - from;
  }

  #countGap(): void {
    const at = this.#options.now();
    if (this.#pieceAt > 0) this.#options.gaps.observe(at - this.#pieceAt);
    this.#pieceAt = at;
  }

  /** @returns false when the leg is over. */
  #onEvent(sent: Uint8Array): boolean {
    const raw = this.#options.reshape?.event(sent) ?? sent;
    const facts = readEvent(raw);
    this.#notes.note(facts);
    // Nothing can follow the end marker: without content before it there is nothing to show.
    if (this.#mode === 'held' && (facts.error !== undefined || facts.done)) {
      this.#settle(facts.error === undefined ? noContent() : errorBeforeContent(facts.error));
      this.#control?.abort(new Error('the engine failed'));
      return false;
    }
    let event = muteEvent(raw, this.#options.mute);
    if (facts.error !== undefined) {
      this.#erred = true;
      event = maskedErrorEvent(event, facts.error);
    }
    if (this.#mode === 'open') {
      this.#sink.write(event);
      return true;
    }
    this.#kept.push(event);
    this.#keptBytes += event.byteLength;
    if (!facts.hasContent && this.#keptBytes <= this.#options.holdBytes) return true;
    if (this.#isDoubtful() || this.#isToOtherPrompt()) return false;
    this.#open();
    return true;
  }

  /** Gives up a reply that nobody has seen and that may be wrong. */
  #isDoubtful(): boolean {
    if (this.#options.isDoubtful?.() !== true) return false;
    this.#settle({ ...timeoutFailure(), cause: 'unhealthy' });
    this.#control?.abort(new Error('the engine may have read too late'));
    return true;
  }

  /** Gives up a reply that nobody has seen and that was generated from the KV of another prompt than its own. */
  #isToOtherPrompt(): boolean {
    const { promptTokenIds: told } = this.#notes.told;
    const { promptTokenIds: given = [] } = this.#options;
    if (told === undefined || given.length === 0 || isSameIds(told, given)) return false;
    this.#settle({ kind: 'failed', cause: 'other_prompt', refusal: OTHER_PROMPT });
    this.#control?.abort(new Error('the engine used another prompt'));
    return true;
  }

  /** Shows the held head: from here on a failure can only be told in the stream. */
  #open(): void {
    this.#mode = 'open';
    this.#contentAt = this.#options.now();
    clearInterval(this.#health);
    this.#sink.start(this.#status, {
      ...replyHeaders(this.#headers),
      ...PASSED_ON,
      ...this.#options.headers,
    });
    this.#sink.write(concat(this.#kept, this.#keptBytes));
    this.#kept = [];
  }

  /** Stops reading from the engine while too much waits for a slow client. */
  #slowDown(): void {
    if (this.#paused || this.#sink.bufferedBytes() <= this.#options.bufferBytes) return;
    this.#paused = true;
    this.#pausedAt = this.#options.now();
    this.#control?.pause();
    this.#disarm();
    this.#sink.onceDrained(() => {
      if (this.#settled) return;
      this.#paused = false;
      this.#pausedMs += this.#options.now() - this.#pausedAt;
      this.#pieceAt = 0;
      this.#arm(this.#options.idleMs, 'idle');
      this.#control?.resume();
    });
  }

  #onEnd(): void {
    if (this.#mode === 'whole' || this.#mode === 'head') this.#endWhole();
    else this.#endStream();
  }

  #endWhole(): void {
    const { auth, mute, headers, now, reshape, toStream } = this.#options;
    const sent = concat(this.#kept, this.#keptBytes);
    const problem = classifyStatus(this.#status, this.#headers, sent, auth);
    if (problem !== undefined) return this.#settle(problem);
    const body = reshape?.whole(sent) ?? sent;
    const reply = readReply(body);
    const stream = toStream?.(body);
    if (reply.kind === 'invalid' || (toStream !== undefined && stream === undefined && reply.error === undefined)) {
      const what = reply.kind === 'invalid' ? 'no JSON object' : 'no reply';
      const refusal = ownRefusal('ENGINE_REPLY_INVALID', `The engine answered with something that is ${what}.`);
      // A JSON object that was cut may hold tokens; a page of some proxy does not.
      const cause = body.find((byte) => byte > 0x20) === 0x7b ? 'started' : 'status';
      return this.#settle({ kind: 'failed', cause, refusal });
    }
    if (reply.error !== undefined) return this.#settle(errorBeforeContent(reply.error));
    this.#notes.noteWhole(reply);
    if (this.#isDoubtful() || this.#isToOtherPrompt()) return;
    const shown = stream ?? muteReply(body, mute);
    this.#contentAt = now();
    this.#sink.start(this.#status, {
      ...replyHeaders(this.#headers),
      ...(stream === undefined ? {} : STREAM_HEADERS),
      ...headers,
      ...(stream === undefined ? { 'content-length': String(shown.byteLength) } : {}),
    });
    this.#sink.write(shown);
    this.#sink.end();
    this.#settle({ kind: 'relayed', facts: this.#facts() });
  }

  #endStream(): void {
    // An engine that closes right after its last line may leave the blank line out.
    const rest = this.#splitter.rest();
    const whole = isWholeEvent(rest);
    if (rest.byteLength > 0 && whole && !this.#onEvent(terminated(rest))) return;
    // Held until here means that there was no content: a finish reason would have been some.
    if (this.#mode === 'held') return this.#settle(noContent());
    const { isDone, hasFinished } = this.#notes;
    const finished = whole && hasFinished && !this.#options.severalChoices;
    if (!isDone && !finished && !this.#erred) return this.#break('cut');
    if (!isDone) this.#sink.write(DONE_EVENT);
    this.#sink.end();
    if (this.#erred) this.#settle({ kind: 'broken', reason: 'engine_error', facts: this.#facts() });
    else this.#settle({ kind: 'relayed', facts: this.#facts() });
  }

  #onFail(failure: LegFailure): void {
    if (this.#sink.signal.aborted) return this.#settle({ kind: 'gone' });
    if (this.#mode === 'open') {
      // Everything was said: how the engine hangs up no longer matters.
      if (this.#notes.isDone || this.#erred) return this.#endStream();
      return this.#break(this.#limit === 'idle' ? 'idle' : 'reset');
    }
    // Nothing of a held stream was shown, and no token of it was seen.
    if (this.#limit === undefined && this.#mode === 'held')
      this.#settle({ ...connectionFailure(failure), cause: 'reset' });
    else if (this.#limit === undefined) this.#settle(connectionFailure(failure));
    else this.#settle({ ...timeoutFailure(), cause: this.#limit === 'unhealthy' ? 'unhealthy' : 'timeout' });
  }

  /** The stream cannot be completed: says so in the stream, never silently. */
  #break(reason: BrokenLeg['reason']): void {
    this.#sink.write(errorEvent(reason === 'idle' ? SILENT : LOST));
    this.#sink.write(DONE_EVENT);
    this.#sink.end();
    this.#settle({ kind: 'broken', reason, facts: this.#facts() });
  }

  #facts(): ReplyFacts {
    return {
      ...this.#notes.told,
      status: this.#status,
      contentAt: this.#contentAt,
      pausedMs: this.#pausedMs,
    };
  }

  /** A limit always has the same time: the one that runs begins anew, which costs less than another timer. */
  #arm(ms: number, limit: 'timeout' | 'idle'): void {
    if (this.#waitsFor === limit) {
      this.#waiting?.refresh();
      return;
    }
    this.#disarm();
    if (ms === 0 || this.#paused) return;
    this.#waitsFor = limit;
    this.#waiting = setTimeout(() => this.#giveUp(limit), ms);
  }

  #disarm(): void {
    clearTimeout(this.#waiting);
    this.#waitsFor = undefined;
  }

  #giveUp(limit: 'timeout' | 'idle' | 'unhealthy'): void {
    this.#limit = limit;
    this.#control?.abort(new Error(`decode leg given up: ${limit}`));
  }

  #settle(result: DecodeResult): void {
    this.#end();
    this.#resolve(result);
  }

  #end(): void {
    this.#settled = true;
    this.#disarm();
    clearInterval(this.#health);
    this.#sink.signal.removeEventListener('abort', this.#leave);
  }
}

const OTHER_PROMPT = ownRefusal(
  'ENGINE_REPLY_INVALID',
  'The engine answered another prompt than the one it was asked.',
);
const LOST: OpenAiError = ownRefusal(
  'ENGINE_CONNECTION_LOST',
  'The connection to the engine broke before its reply was whole.',
).error;
const SILENT: OpenAiError = ownRefusal('ENGINE_TIMEOUT', 'The engine stopped sending.').error;

/** An error object in a 200 reply, before any content: the status the engine meant. */
function errorBeforeContent(error: NonNullable<EventFacts['error']>): FailedLeg | RefusedLeg {
  const { code } = error;
  const isStatus = typeof code === 'number' && Number.isInteger(code) && code >= 400 && code < 600;
  const status = isStatus ? code : 502;
  return classifyError(status, describeEngineError(status, error), 1);
}

function noContent(): FailedLeg {
  const refusal = ownRefusal('ENGINE_CONNECTION_LOST', 'The engine ended its reply without content.');
  return { kind: 'failed', cause: 'status', refusal };
}

function maskedErrorEvent(event: Uint8Array, error: NonNullable<EventFacts['error']>): Uint8Array {
  const message = maskMessage(error.message);
  if (message === error.message) return event;
  return encoder.encode(errorEvent({ ...error, type: error.type ?? 'upstream_error', message }));
}

/** False for an event whose data was cut off; comments and other fields lose nothing that matters. */
function isWholeEvent(rest: Uint8Array): boolean {
  if (dataLines(rest).length === 0) return true;
  const facts = readEvent(rest);
  return facts.done || facts.error !== undefined || facts.seen.length > 0 || facts.usage !== undefined;
}

function terminated(rest: Uint8Array): Uint8Array {
  return concat([rest, encoder.encode('\n\n')], rest.byteLength + 2);
}
