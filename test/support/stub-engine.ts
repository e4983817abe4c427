import { createServer, type IncomingHttpHeaders, type IncomingMessage, type ServerResponse } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { configOf, type HarnessOptions, startQuietly } from './harness.ts';

/** A request as a stub engine got it. */
export interface StubRequest {
  readonly method: string;
  readonly path: string;
  readonly headers: IncomingHttpHeaders;
  readonly body: Buffer;
}

/** Answers one generating request with whatever the test wants to see relayed. */
export type StubAnswer = (response: ServerResponse, request: StubRequest) => void;

/** An HTTP server that looks like an engine to probes and says what the test tells it. */
interface StubEngine extends AsyncDisposable {
  readonly url: string;
  /** Requests for completions in the order they came. */
  readonly requests: StubRequest[];
  /** Every other request: baton's probes. */
  readonly probes: StubRequest[];
  answer: StubAnswer;
}

/** The one model that stubs serve. */
export const STUB_MODEL = 'stub';

/** A handle as no serialiser would write it, so that a copy of its bytes can be told from a rebuilt one. */
export const ODD_HANDLE =
  '{ "do_remote_prefill" : true,"do_remote_decode":false, "remote_block_ids":[[ 1,2 ]],"remote_engine_id":"e\\u002d1",' +
  '"remote_request_id":"r-1\\/x","remote_host":"10.9.9.9","remote_port":5600,"tp_size":1,"zz":[1.50,12345678901234567890]}';

/** Sends a whole JSON reply; `body` is the exact text. */
export function sayJson(
  body: string | Uint8Array,
  status = 200,
  headers: Readonly<Record<string, string>> = {},
): StubAnswer {
  return (response) => {
    response.writeHead(status, { 'content-type': 'application/json', ...headers });
    response.end(body);
  };
}

/** Sends a stream of which every piece is an HTTP chunk of its own, then ends cleanly. */
export function sayStream(
  pieces: readonly (string | Uint8Array)[],
  headers: Readonly<Record<string, string>> = {},
): StubAnswer {
  return (response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8', ...headers });
    for (const piece of pieces) if (piece.length > 0) response.write(piece);
    response.end();
  };
}

/** Sends pieces of a stream, then resets the connection once the client has said that it saw them. */
export function sayThenReset(pieces: readonly string[], when: Promise<unknown>): StubAnswer {
  return (response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    for (const piece of pieces) response.write(piece);
    void when.then(() => response.socket?.resetAndDestroy());
  };
}

/** A prefill engine's reply with the given handle. */
export const sayHandle = (handle: string = ODD_HANDLE): StubAnswer =>
  sayJson(`{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":${handle}}`);

/** A decode engine's short whole reply. */
const sayHello = sayJson('{"choices":[{"index":0,"text":"hello","finish_reason":"stop"}]}');

/** Answers what asks for a handle with one, a stream with so many events, and all else with a short reply. */
export function sayByRequest(events: number): StubAnswer {
  const [handle, event] = [sayHandle(), Buffer.from('data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')];
  return (response, request) => {
    if (request.body.includes('"do_remote_decode"')) return handle(response, request);
    if (!request.body.includes('"stream":true')) return sayHello(response, request);
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    let left = events;
    const more = () => {
      while (left-- > 0) if (!response.write(event)) return;
      response.end('data: [DONE]\n\n');
    };
    response.on('drain', more).on('error', () => undefined);
    more();
  };
}

/** Starts a stub on a free port; without a block size it has no metrics. */
export async function startStubEngine(answer: StubAnswer, blockSize?: number): Promise<StubEngine> {
  const requests: StubRequest[] = [];
  const probes: StubRequest[] = [];
  const server = createServer((request, response) => {
    void readRequest(request).then(
      (got) => {
        if (got.method === 'POST' && /^\/v1\/(?:chat\/)?completions/.test(got.path)) {
          requests.push(got);
          stub.answer(response, got);
          return;
        }
        probes.push(got);
        const pages: Readonly<Record<string, string>> = {
          '/health': '',
          '/v1/models': `{"object":"list","data":[{"id":"${STUB_MODEL}"}]}`,
          ...(blockSize === undefined ? {} : { '/metrics': `vllm:cache_config_info{block_size="${blockSize}"} 1.0\n` }),
        };
        const page = pages[got.path];
        response.writeHead(page === undefined ? 404 : 200).end(page);
      },
      () => undefined,
    );
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const stub: StubEngine = {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    requests,
    probes,
    answer,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
  return stub;
}

async function readRequest(request: IncomingMessage): Promise<StubRequest> {
  const chunks: Buffer[] = [];
  for await (const chunk of request) chunks.push(chunk as Buffer);
  const { method = '', url: path = '', headers } = request;
  return { method, path, headers, body: Buffer.concat(chunks) };
}

/** baton in front of stub engines. */
export interface Stubbed extends AsyncDisposable {
  readonly url: string;
  readonly port: number;
  readonly adminUrl: string;
  readonly rpcUrl: string;
  readonly prefill: readonly StubEngine[];
  readonly decode: readonly StubEngine[];
  readonly log: readonly Readonly<Record<string, unknown>>[];
  /** The only engine of each pool, for the usual case. */
  readonly p: StubEngine;
  readonly d: StubEngine;
  /** Forgets what the engines got and lets them answer as at the start. */
  reset(): void;
  /** Forgets the lines of the log. */
  forgetLog(): void;
}

interface StubbedOptions extends Omit<HarnessOptions, 'engine'> {
  /** Tokens per KV block that the decode engines report, in their order. Default: they report none. */
  readonly decodeBlockSizes?: readonly number[];
  /** The same of every prefill engine. */
  readonly prefillBlockSize?: number;
}

/** Starts stubs and baton; defaults: one of each pool, P gives the odd handle, D says hello. */
export async function startStubbed(options: StubbedOptions = {}): Promise<Stubbed> {
  await using stack = new AsyncDisposableStack();
  const many = async (count: number, answer: StubAnswer, blockSize: (i: number) => number | undefined) => {
    const stubs: StubEngine[] = [];
    for (let i = 0; i < count; i++) stubs.push(stack.use(await startStubEngine(answer, blockSize(i))));
    return stubs;
  };
  const prefill = await many(options.prefill ?? 1, sayHandle(), () => options.prefillBlockSize);
  const decode = await many(options.decode ?? 1, sayHello, (i) => options.decodeBlockSizes?.[i]);
  const [p] = prefill;
  const [d] = decode;
  if (p === undefined || d === undefined) throw new Error('a stubbed baton has at least one engine of each pool');
  const flags = { prefill: prefill.map(({ url }) => url), decode: decode.map(({ url }) => url), ...options.flags };
  const { baton, log } = await startQuietly(configOf(flags, options.yaml, options.env));
  stack.defer(() => baton.stop());
  const resources = stack.move();
  const url = new URL(`http://${baton.addresses.facade}`);
  return {
    url: url.origin,
    port: Number(url.port),
    adminUrl: `http://${baton.addresses.admin}`,
    rpcUrl: `http://${baton.addresses.rpc}`,
    prefill,
    decode,
    log,
    p,
    d,
    reset() {
      for (const [stubs, answer] of [[prefill, sayHandle()] as const, [decode, sayHello] as const]) {
        for (const stub of stubs) {
          stub.requests.length = 0;
          stub.answer = answer;
        }
      }
    },
    forgetLog: () => void log.splice(0),
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

/** Writes bytes to a TCP port and reads what comes back until the other side closes; `end: false` leaves it half open. */
export function sendRaw(port: number, bytes: string | Uint8Array, end = true): Promise<string> {
  return new Promise((resolve) => {
    let text = '';
    const socket = connect({ port, host: '127.0.0.1', allowHalfOpen: true }, () => {
      if (end) socket.end(bytes);
      else socket.write(bytes);
    });
    socket.setEncoding('latin1');
    socket.on('data', (data: string) => {
      text += data;
    });
    socket.on('error', () => socket.destroy());
    socket.on('end', () => socket.destroy());
    socket.on('close', () => resolve(text));
  });
}
