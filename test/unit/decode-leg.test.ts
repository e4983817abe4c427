import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { EngineClient, type LegControl, type LegHandler, type LegRequest } from '../../src/engine/client.ts';
import type { ClientSink } from '../../src/services/client-sink.ts';
import { type DecodeLegOptions, type DecodeResult, runDecodeLeg } from '../../src/services/decode-leg.ts';
import { runWholeLeg } from '../../src/services/leg.ts';
import { replyHeaders } from '../../src/services/reply-headers.ts';

const bytes = (text: string) => new TextEncoder().encode(text);

/** An engine whose reply the test plays. */
class PlayedEngine extends EngineClient {
  handler: LegHandler | undefined;
  readonly calls: string[] = [];

  constructor() {
    super({ connectMs: 0, keepAliveMs: 0 });
  }

  override send(_request: LegRequest, handler: LegHandler): LegControl {
    this.handler = handler;
    return {
      pause: () => this.calls.push('pause'),
      resume: () => this.calls.push('resume'),
      abort: (cause) => {
        this.calls.push('abort');
        handler.fail({ kind: 'aborted', reused: false, replied: true, cause });
      },
    };
  }

  head(status = 200, type = 'text/event-stream; charset=utf-8', more: Record<string, string> = {}): void {
    this.handler?.head(status, { 'content-type': type, ...more });
  }

  data(text: string): void {
    this.handler?.data(bytes(text));
  }

  end(): void {
    this.handler?.end();
  }

  reset(reused = false): void {
    this.handler?.fail({ kind: 'reset', reused, replied: true, cause: new Error('reset') });
  }
}

/** A client that keeps what it is sent, and takes it when the test says so. */
class PlayedClient implements ClientSink {
  readonly left = new AbortController();
  status = 0;
  headers: Readonly<Record<string, string>> = {};
  text = '';
  ended = false;
  waiting = 0;
  takesAll = true;
  drained: (() => void) | undefined;

  get signal(): AbortSignal {
    return this.left.signal;
  }

  start(status: number, headers: Readonly<Record<string, string>>): void {
    expect(this.status).toBe(0);
    this.status = status;
    this.headers = headers;
  }

  write(piece: Uint8Array | string): void {
    const size = typeof piece === 'string' ? piece.length : piece.byteLength;
    this.text += typeof piece === 'string' ? piece : new TextDecoder().decode(piece);
    if (!this.takesAll) this.waiting += size;
  }

  end(): void {
    this.ended = true;
  }

  bufferedBytes(): number {
    return this.waiting;
  }

  onceDrained(callback: () => void): void {
    this.drained = callback;
  }
}

interface Played {
  readonly engine: PlayedEngine;
  readonly client: PlayedClient;
  readonly result: Promise<DecodeResult>;
}

function play(options: Partial<DecodeLegOptions> = {}): Played {
  const engine = new PlayedEngine();
  const client = new PlayedClient();
  const request: LegRequest = { url: 'http://d', method: 'POST', path: '/', headers: {}, body: null };
  const result = runDecodeLeg(engine, request, client, {
    auth: 'none',
    mute: { top: ['kv_transfer_params'], choice: [] },
    onProgress: () => undefined,
    onHead: () => undefined,
    gaps: { observe: () => undefined },
    headers: { 'x-request-id': 'req' },
    firstContentMs: 0,
    wholeReplyMs: 0,
    idleMs: 0,
    streamed: true,
    severalChoices: false,
    captureTokens: false,
    holdBytes: 65_536,
    bufferBytes: 1000,
    isHopeless: () => false,
    now: () => 7,
    ...options,
  });
  return { engine, client, result };
}

const ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n';
const FINISH = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"kv_transfer_params":null}\n\n';
const DONE = 'data: [DONE]\n\n';
const ERROR = 'data: {"error":{"message":"Internal server error","type":"E","param":null,"code":500}}\n\n';
const content = (text: string) => `data: {"choices":[{"index":0,"delta":{"content":"${text}"}}]}\n\n`;

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  expect(vi.getTimerCount()).toBe(0);
  vi.useRealTimers();
});

describe('until the first content', () => {
  test('nothing goes out, then everything, byte for byte', async () => {
    const { engine, client, result } = play();
    engine.head();
    engine.data(`: hello\r\n\r\n${ROLE}`);
    expect([client.status, client.text]).toEqual([0, '']);
    engine.data(content('a').slice(0, 20));
    expect(client.status).toBe(0);
    engine.data(content('a').slice(20));
    expect(client.status).toBe(200);
    expect(client.headers).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache',
      'x-accel-buffering': 'no',
      'x-request-id': 'req',
    });
    engine.data(FINISH + DONE);
    engine.end();
    expect(client.text).toBe(`: hello\r\n\r\n${ROLE}${content('a')}${FINISH}${DONE}`);
    expect(await result).toMatchObject({ kind: 'relayed', facts: { status: 200, contentAt: 7 } });
    expect(client.ended).toBe(true);
  });

  test('an error event is a failure with the engine’s status', async () => {
    const { engine, client, result } = play();
    engine.head();
    engine.data(ROLE + ERROR + DONE);
    expect(await result).toMatchObject({
      kind: 'failed',
      cause: 'status',
      refusal: { status: 500, error: { message: 'Internal server error' } },
    });
    expect([client.status, client.text, client.ended]).toEqual([0, '', false]);
    expect(engine.calls).toEqual(['abort']);
  });

  test.each([
    [false, 'reset'],
    [true, 'stale'],
  ] as const)('a reset before the head, connection used before %s: %s', async (reused, cause) => {
    const { engine, result } = play();
    engine.handler?.fail({ kind: 'reset', reused, replied: false, cause: new Error('reset') });
    expect(await result).toMatchObject({ kind: 'failed', cause });
  });

  test.each(['', ROLE])('a reset after the head and %j can be repaired', async (events) => {
    const { engine, client, result } = play();
    engine.head();
    if (events !== '') engine.data(events);
    engine.reset(true);
    expect(await result).toMatchObject({ kind: 'failed', cause: 'reset' });
    expect(client.status).toBe(0);
  });

  test('a reset within a whole reply cannot: it was generated', async () => {
    const { engine, result } = play({ streamed: false });
    engine.head(200, 'application/json');
    engine.data('{"choices":');
    engine.reset();
    expect(await result).toMatchObject({ kind: 'failed', cause: 'started' });
  });

  test('silence ends at the limit, with the head or without', async () => {
    for (const withHead of [false, true]) {
      const { engine, result } = play({ firstContentMs: 50 });
      if (withHead) engine.head();
      if (withHead) engine.data(ROLE);
      vi.advanceTimersByTime(49);
      expect(engine.calls).toEqual([]);
      vi.advanceTimersByTime(1);
      expect(await result).toMatchObject({ kind: 'failed', cause: 'timeout', refusal: { status: 504 } });
    }
  });

  test('an engine that is beyond hope is given up', async () => {
    let hopeless = false;
    const { engine, result } = play({ isHopeless: () => hopeless });
    vi.advanceTimersByTime(5000);
    expect(engine.calls).toEqual([]);
    hopeless = true;
    vi.advanceTimersByTime(1000);
    expect(await result).toMatchObject({ kind: 'failed', cause: 'unhealthy' });
  });

  test('the hold has a limit', async () => {
    const { engine, client, result } = play({ holdBytes: 100 });
    engine.head();
    engine.data(`${ROLE}${ROLE}`);
    expect(client.text).toBe(ROLE + ROLE);
    engine.data(ERROR + DONE);
    engine.end();
    expect(await result).toMatchObject({ kind: 'broken', reason: 'engine_error' });
  });

  test('no content and no finish: an error, never an empty 200', async () => {
    const { engine, client, result } = play();
    engine.head();
    engine.data(ROLE);
    engine.end();
    expect(await result).toMatchObject({ kind: 'failed', refusal: { status: 502 } });
    expect(client.status).toBe(0);
  });

  test('a client that has left: nothing is sent', async () => {
    const left = new PlayedClient();
    left.left.abort();
    const engine = new PlayedEngine();
    const request: LegRequest = { url: 'http://d', method: 'POST', path: '/', headers: {}, body: null };
    const options = { ...({} as DecodeLegOptions) };
    expect(await runDecodeLeg(engine, request, left, options)).toEqual({ kind: 'gone' });
    expect(engine.handler).toBeUndefined();
  });

  test('a client that leaves: the engine is told', async () => {
    const { engine, client, result } = play({ firstContentMs: 1000 });
    engine.head();
    client.left.abort();
    expect(await result).toEqual({ kind: 'gone' });
    expect(engine.calls).toEqual(['abort']);
  });
});

describe('after the first content', () => {
  function open(options: Partial<DecodeLegOptions> = {}): Played {
    const played = play(options);
    played.engine.head();
    played.engine.data(ROLE + content('a'));
    return played;
  }

  test.each([
    ['reset', 'engine_connection_lost'],
    ['cut', 'engine_connection_lost'],
    ['idle', 'engine_timeout'],
  ] as const)('%s: an error event and [DONE]', async (reason, code) => {
    const { engine, client, result } = open({ idleMs: 100 });
    if (reason === 'reset') engine.reset();
    if (reason === 'cut') engine.end();
    if (reason === 'idle') vi.advanceTimersByTime(100);
    expect(await result).toMatchObject({ kind: 'broken', reason, facts: { status: 200 } });
    const rest = client.text.slice((ROLE + content('a')).length);
    expect(JSON.parse(rest.slice('data: '.length, rest.indexOf('\n')))).toMatchObject({ error: { code } });
    expect(rest.endsWith(`\n\n${DONE}`)).toBe(true);
    expect(client.ended).toBe(true);
  });

  test('every event starts the idle time anew', async () => {
    const { engine, client, result } = open({ idleMs: 100 });
    for (let i = 0; i < 5; i += 1) {
      vi.advanceTimersByTime(99);
      engine.data(content('b'));
    }
    engine.data(FINISH + DONE);
    engine.end();
    expect(await result).toMatchObject({ kind: 'relayed' });
    expect(client.text).toContain(FINISH + DONE);
  });

  test('[DONE] is added where it is missing, once', async () => {
    for (const last of ['', DONE]) {
      const { engine, client, result } = open();
      engine.data(FINISH + last);
      engine.end();
      expect(await result).toMatchObject({ kind: 'relayed' });
      expect(client.text.split(DONE)).toHaveLength(2);
      expect(client.text.endsWith(FINISH + DONE)).toBe(true);
    }
  });

  test('several choices: one that never began is missing, unless [DONE] says that all is there', async () => {
    for (const last of ['', DONE]) {
      const { engine, client, result } = open({ severalChoices: true });
      engine.data(FINISH + last);
      engine.end();
      const want = last === '' ? { kind: 'broken', reason: 'cut' } : { kind: 'relayed' };
      expect(await result).toMatchObject(want);
      expect(client.text.endsWith(DONE)).toBe(true);
      expect(client.text.split(DONE)).toHaveLength(2);
    }
  });

  test('a last event without its blank line', async () => {
    const { engine, client, result } = open();
    engine.data(`${FINISH}data: [DONE]\n`);
    engine.end();
    expect(await result).toMatchObject({ kind: 'relayed' });
    expect(client.text).toMatch(/data: \[DONE\]\n\n\n?$/);
  });

  test('a reset after [DONE] is no failure', async () => {
    const { engine, result } = open();
    engine.data(FINISH + DONE);
    engine.reset();
    expect(await result).toMatchObject({ kind: 'relayed' });
  });

  test('an error of the engine loses the addresses in it', async () => {
    const { engine, client, result } = open();
    engine.data('data: {"error":{"message":"no route to 10.0.0.7:8200","type":"E","param":null,"code":500}}\n\n');
    engine.end();
    expect(await result).toMatchObject({ kind: 'broken', reason: 'engine_error' });
    expect(client.text).toContain('no route to [address]');
    expect(client.text).not.toContain('10.0.0.7');
    expect(client.text.endsWith(DONE)).toBe(true);
  });

  test('the handle for the next turn is kept from the client', async () => {
    const { engine, client, result } = open();
    engine.data('data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"kv_transfer_params":{"a":1}}\n\n');
    engine.data(DONE);
    engine.end();
    const ended = await result;
    if (ended.kind !== 'relayed') throw new Error(ended.kind);
    expect(new TextDecoder().decode(ended.facts.kvTransferParams)).toBe('{"a":1}');
    expect(client.text).toContain('"kv_transfer_params":null}');
  });
});

describe('a slow client', () => {
  function open(options: Partial<DecodeLegOptions> = {}): Played {
    const played = play({ bufferBytes: 1000, ...options });
    played.client.takesAll = false;
    played.engine.head();
    played.engine.data(content('a'));
    return played;
  }

  test('reading stops above the limit and goes on when all is taken', async () => {
    const { engine, client, result } = open({ idleMs: 100 });
    while (client.waiting <= 1000) {
      expect(engine.calls).toEqual([]);
      engine.data(content('b'));
    }
    expect(engine.calls).toEqual(['pause']);
    // What was under way when reading stopped still counts as one pause, and the engine is not to blame for the silence.
    engine.data(content('c'));
    expect(engine.calls).toEqual(['pause']);
    vi.advanceTimersByTime(10_000);
    expect(engine.calls).toEqual(['pause']);
    client.waiting = 0;
    client.drained?.();
    expect(engine.calls).toEqual(['pause', 'resume']);
    engine.data(FINISH + DONE);
    engine.end();
    expect(await result).toMatchObject({ kind: 'relayed' });
  });

  test('the idle time runs again after the pause', async () => {
    const { engine, client, result } = open({ idleMs: 100, bufferBytes: 1 });
    expect(engine.calls).toEqual(['pause']);
    client.waiting = 0;
    client.drained?.();
    vi.advanceTimersByTime(100);
    expect(await result).toMatchObject({ kind: 'broken', reason: 'idle' });
  });

  test('an engine that breaks meanwhile: nothing is left running', async () => {
    const { engine, client, result } = open({ idleMs: 100, bufferBytes: 1 });
    engine.reset();
    expect(await result).toMatchObject({ kind: 'broken', reason: 'reset' });
    client.waiting = 0;
    client.drained?.();
    expect(vi.getTimerCount()).toBe(0);
  });
});

describe('a whole reply', () => {
  test('goes out as it came, but for the handle', async () => {
    const { engine, client, result } = play({ streamed: false });
    engine.head(200, 'application/json', {
      connection: 'keep-alive, x-hop',
      'x-hop': '1',
      'x-engine': '2',
      server: 'u',
    });
    engine.data('{"choices":[{"index":0,"message":{"content":"ä"}}],"big":12345678901234567890,');
    engine.data('"kv_transfer_params":{"remote_port":1},"usage":{"prompt_tokens":3,"completion_tokens":2}}');
    engine.end();
    expect(await result).toMatchObject({ kind: 'relayed', facts: { usage: { promptTokens: 3, completionTokens: 2 } } });
    expect(client.text).toBe(
      '{"choices":[{"index":0,"message":{"content":"ä"}}],"big":12345678901234567890,"kv_transfer_params":null,"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    );
    expect(client.headers).toEqual({
      'content-type': 'application/json',
      'content-length': String(bytes(client.text).byteLength),
      'x-engine': '2',
      'x-request-id': 'req',
    });
  });

  test.each([
    [400, 'refused'],
    [404, 'refused'],
    [429, 'failed'],
    [500, 'failed'],
    [503, 'failed'],
    [302, 'failed'],
  ] as const)('%i is %s', async (status, kind) => {
    const { engine, client, result } = play({ streamed: false });
    engine.head(status, 'application/json');
    engine.data('{"error":{"message":"m","type":"t","param":null,"code":1}}');
    engine.end();
    expect(await result).toMatchObject({ kind });
    expect(client.status).toBe(0);
  });

  test('waits for its own limit, not for the first content’s', async () => {
    const { engine, result } = play({ streamed: false, firstContentMs: 10, wholeReplyMs: 100 });
    vi.advanceTimersByTime(99);
    expect(engine.calls).toEqual([]);
    vi.advanceTimersByTime(1);
    expect(await result).toMatchObject({ kind: 'failed', cause: 'timeout' });
  });
});

test('headers of one connection are dropped', () => {
  const headers = { connection: 'x-a', 'x-a': '1', 'transfer-encoding': 'chunked', 'x-b': '2' };
  expect(replyHeaders(headers)).toEqual({ 'x-b': '2' });
});

test('a leg that fails while it is sent is a failure like any other', async () => {
  class FailingEngine extends EngineClient {
    override send(_request: LegRequest, handler: LegHandler): LegControl {
      handler.fail({ kind: 'not_sent', reused: false, replied: false, cause: new Error('destroyed') });
      return { pause: () => undefined, resume: () => undefined, abort: () => undefined };
    }
  }
  const engines = new FailingEngine({ connectMs: 0, keepAliveMs: 0 });
  const request: LegRequest = { url: 'http://p', method: 'POST', path: '/', headers: {}, body: null };
  const { signal } = new AbortController();
  const result = await runWholeLeg(engines, request, { timeoutMs: 100, signal, now: () => 0 });
  expect(result).toMatchObject({ kind: 'failed', cause: 'not_sent' });
});
