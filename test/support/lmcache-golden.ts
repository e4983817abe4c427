import { createServer, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { Push } from 'zeromq';
import { freePort } from './free-port.ts';
import { configOf, startQuietly } from './harness.ts';

type Body = Readonly<Record<string, unknown>>;

/** One call of an engine, as it came. */
export interface Call {
  /** `P0`, `D1` … */
  readonly engine: string;
  readonly path: string;
  readonly body: Body;
}

/** What the prefill engines do besides the golden reply. */
export interface PrefillKnobs {
  finishReason: string;
  /** Undefined: a notice for each init port. */
  noticeCount: number | undefined;
  /** The notices wait for this; by default they go right after the reply. */
  noticeAfter: Promise<unknown>;
  /** The notices go before the reply. */
  noticeFirst: boolean;
  /** The reply waits for this. */
  replyAfter: Promise<unknown>;
  /** Other frames, sent before the notices. */
  junk: readonly (readonly Uint8Array[])[];
}

/** What the decode engines do besides the golden stream. */
export interface DecodeKnobs {
  /** All events in one write. */
  coalesce: boolean;
  /** Every byte in a write of its own. */
  split: boolean;
  /** Engines that answer 500, by name. */
  failing: readonly string[];
  /** The connection is cut after this many events. */
  cutAfter: number;
}

/** The golden simulators in front of a baton with the example proxy's command line. */
export interface Golden extends AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  readonly calls: Call[];
  /** Bytes of every notice sent, in hex. */
  readonly sent: string[];
  readonly prefill: PrefillKnobs;
  readonly decode: DecodeKnobs;
  /** Ports of each decoder by its `disagg_spec`. */
  readonly initPort: number;
  readonly allocPort: number;
  /** Sends bytes to the notice socket, as some prefill engine. */
  notify(...frames: readonly Uint8Array[]): Promise<void>;
  callsOf(engine: string, path?: string): readonly Call[];
}

/** The bytes of a notice with a given id, written by hand. */
export function noticeBytes(id: string, tag = 'ProxyNotif'): Uint8Array {
  const short = (text: string) => [0xa0 | text.length, ...Buffer.from(text)];
  const any = (text: string) => (text.length < 32 ? short(text) : [0xd9, text.length, ...Buffer.from(text)]);
  return Uint8Array.from([0x82, ...short('type'), ...short(tag), ...short('req_id'), ...any(id)]);
}

interface GoldenOptions {
  readonly ranks?: number;
  readonly flags?: Readonly<Record<string, string | readonly string[]>>;
  readonly yaml?: string;
  readonly env?: Readonly<Record<string, string>>;
  /** Runs before baton starts; frames sent here wait in the socket's queue. */
  readonly before?: (notify: Golden['notify']) => Promise<void>;
}

const INIT_PORT = 17_300;
const ALLOC_PORT = 17_400;

/** Starts two prefill and two decode simulators and baton. */
export async function startGolden(options: GoldenOptions = {}): Promise<Golden> {
  await using stack = new AsyncDisposableStack();
  const port = await freePort();
  const socket = new Push({ linger: 0, reconnectInterval: 20 });
  socket.connect(`tcp://127.0.0.1:${port}`);
  stack.defer(() => socket.close());
  let last: Promise<void> = Promise.resolve();
  const notify = (...frames: readonly Uint8Array[]) => {
    last = last.then(() => socket.send([...frames])).catch(() => undefined);
    return last;
  };
  const state = {
    calls: [] as Call[],
    sent: [] as string[],
    prefill: {
      finishReason: 'length',
      noticeCount: undefined,
      noticeAfter: Promise.resolve(),
      noticeFirst: false,
      replyAfter: Promise.resolve(),
      junk: [],
    } as PrefillKnobs,
    decode: { coalesce: false, split: false, failing: [], cutAfter: Number.POSITIVE_INFINITY } as DecodeKnobs,
  };
  const start = async (name: string, generate: (response: ServerResponse, body: Body) => Promise<void>) => {
    const server = createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on('data', (chunk: Buffer) => chunks.push(chunk));
      request.on('end', () => {
        const path = request.url ?? '';
        if (request.method === 'GET') {
          const card = '{"object":"list","data":[{"id":"m","object":"model"}]}';
          response.writeHead(path === '/metrics' ? 404 : 200).end(path === '/v1/models' ? card : '');
          return;
        }
        const body = JSON.parse(Buffer.concat(chunks).toString()) as Body;
        // Baton's look at an engine's template names no model.
        if (path !== '/tokenize' || body['model'] !== undefined) state.calls.push({ engine: name, path, body });
        if (path === '/tokenize') sayJson(response, tokenize(body));
        else void generate(response, body);
      });
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    stack.defer(async () => {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    });
    return String((server.address() as AddressInfo).port);
  };
  const prefill = (response: ServerResponse, body: Body) => answerPrefill(state, notify, response, body);
  const decode = (name: string) => async (response: ServerResponse, body: Body) =>
    answerDecode(state.decode, name, response, body);
  const p = [await start('P0', prefill), await start('P1', prefill)];
  const d = [await start('D0', decode('D0')), await start('D1', decode('D1'))];
  const list = (first: number) => Array.from({ length: options.ranks ?? 1 }, (_, rank) => first + rank).join(',');
  await options.before?.(notify);
  const flags = {
    'kv-connector': 'lmcache',
    'prefiller-host': ['127.0.0.1'],
    'prefiller-port': [p.join(',')],
    'decoder-host': ['127.0.0.1'],
    'decoder-port': [d.join(',')],
    'decoder-init-port': [list(INIT_PORT)],
    'decoder-alloc-port': [list(ALLOC_PORT)],
    'proxy-host': '127.0.0.1',
    'proxy-port': String(port),
    ...options.flags,
  };
  const { baton } = await startQuietly(configOf(flags, options.yaml, options.env));
  stack.defer(() => baton.stop());
  const resources = stack.move();
  return {
    ...state,
    url: `http://${baton.addresses.facade}`,
    adminUrl: `http://${baton.addresses.admin}`,
    initPort: INIT_PORT,
    allocPort: ALLOC_PORT,
    notify,
    callsOf: (engine, path = '/v1/completions') =>
      state.calls.filter((call) => call.engine === engine && call.path === path),
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

function sayJson(response: ServerResponse, value: unknown, status = 200): void {
  response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(value));
}

/** One id for each word of the prompt or of the messages, behind a first one. */
function tokenize(body: Body) {
  const messages = body['messages'] as readonly { readonly content: string }[] | undefined;
  const text = messages?.map(({ content }) => content).join(' ') ?? String(body['prompt']);
  const tokens = [128_000, ...text.split(' ').map((_, i) => 1000 + i)];
  return { count: tokens.length, max_model_len: 4096, tokens, token_strs: null };
}

async function answerPrefill(
  state: { readonly prefill: PrefillKnobs; readonly sent: string[] },
  notify: Golden['notify'],
  response: ServerResponse,
  body: Body,
): Promise<void> {
  const knobs = { ...state.prefill };
  if (Number(body['max_tokens']) < 1) return sayJson(response, { error: { message: 'max_tokens', code: 400 } }, 400);
  const params = body['kv_transfer_params'] as { readonly disagg_spec?: Body } | undefined;
  const spec = params?.disagg_spec;
  const tell = async () => {
    await knobs.noticeAfter;
    for (const frames of knobs.junk) await notify(...frames);
    const ports = spec?.['receiver_init_port'] as readonly number[];
    for (let i = 0; i < (knobs.noticeCount ?? ports.length); i++) {
      const bytes = noticeBytes(String(spec?.['req_id']));
      state.sent.push(Buffer.from(bytes).toString('hex'));
      await notify(bytes);
    }
  };
  if (knobs.noticeFirst) await tell();
  await knobs.replyAfter;
  const size = (body['prompt'] as readonly number[]).length;
  sayJson(response, {
    id: 'cmpl-p1',
    object: 'text_completion',
    created: 1_700_000_000,
    model: 'm',
    choices: [
      {
        index: 0,
        text: ' Hello',
        logprobs: null,
        finish_reason: knobs.finishReason,
        stop_reason: null,
        prompt_logprobs: null,
      },
    ],
    usage: { prompt_tokens: size, total_tokens: size + 1, completion_tokens: 1, prompt_tokens_details: null },
    kv_transfer_params: { first_tok: 9906 },
  });
  if (!knobs.noticeFirst) await tell();
}

async function answerDecode(knobs: DecodeKnobs, name: string, response: ServerResponse, body: Body): Promise<void> {
  const max = Number(body['max_tokens']);
  if (max < 1) return sayJson(response, { error: { message: 'max_tokens', code: 400 } }, 400);
  if (knobs.failing.includes(name)) return sayJson(response, { error: { message: 'no', code: 500 } }, 500);
  const size = (body['prompt'] as readonly number[]).length;
  const usage = { prompt_tokens: size, total_tokens: size + max, completion_tokens: max };
  const base = { id: 'cmpl-d1', object: 'text_completion', created: 1_700_000_001, model: 'm' };
  const finish = (i: number) => (i === max - 1 ? 'length' : null);
  if (body['stream'] !== true) {
    const text = Array.from({ length: max }, (_, i) => ` w${i}`).join('');
    const choices = [{ index: 0, text, logprobs: null, finish_reason: 'length', stop_reason: null }];
    return sayJson(response, { ...base, choices, usage });
  }
  const events: unknown[] = Array.from({ length: max }, (_, i) => ({
    ...base,
    choices: [{ index: 0, text: ` w${i}`, logprobs: null, finish_reason: finish(i), stop_reason: null }],
  }));
  const options = body['stream_options'] as { readonly include_usage?: boolean } | undefined;
  if (options?.include_usage === true) events.push({ ...base, choices: [], usage });
  const texts = [...events.map((event) => `data: ${JSON.stringify(event)}\n\n`), 'data: [DONE]\n\n'];
  response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8' });
  const whole = texts.join('');
  const pieces = knobs.coalesce ? [whole] : knobs.split ? [...whole] : texts;
  for (const [i, piece] of pieces.entries()) {
    if (i >= knobs.cutAfter) {
      // What was written is to arrive; then the connection breaks.
      await new Promise((resolve) => response.write('', resolve));
      response.socket?.resetAndDestroy();
      return;
    }
    await new Promise((resolve) => response.write(piece, resolve));
  }
  response.end();
}
