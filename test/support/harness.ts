import type { Config } from '../../src/config/config.ts';
import { type Loaded, type LoadResult, loadConfig } from '../../src/config/load-config.ts';
import { KNOWN } from '../../src/known.ts';
import { createLogger } from '../../src/obs/log.ts';
import type { ReloadSource } from '../../src/roles/reload.ts';
import { type Running, startBaton } from '../../src/roles.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { type Settings, startExecutable } from './executable.ts';

/** baton in this process, in front of simulated engines that the test controls. */
export interface Harness extends AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  readonly rpcUrl: string;
  readonly prefill: readonly Sim[];
  readonly decode: readonly Sim[];
  /** An aggregated engine with the same weights: what every answer must equal. */
  readonly plain: Sim;
  /** Log lines as JSON objects. */
  readonly log: readonly Readonly<Record<string, unknown>>[];
  readonly config: Config;
  /** Resolves when every engine is READY. */
  ready(): Promise<void>;
}

export interface HarnessOptions {
  readonly prefill?: number;
  readonly decode?: number;
  readonly engine?: Omit<SimOptions, 'role' | 'port' | 'sidePort'>;
  /** What one engine of a pool has of its own. */
  readonly engineOf?: (role: 'prefill' | 'decode', index: number) => SimOptions;
  /** Content of a configuration file; the pools are added by the harness. */
  readonly yaml?: string;
  readonly flags?: Readonly<Record<string, string | readonly string[]>>;
  readonly env?: Readonly<Record<string, string>>;
}

/** What settings of a test are made from, on free ports. */
export function loadInput(
  flags: Readonly<Record<string, string | readonly string[]>>,
  env: Readonly<Record<string, string>> = {},
) {
  const anyPort = { host: '127.0.0.1', port: '0', 'rpc-port': '0', 'admin-port': '0' };
  return {
    // The turns of tests are short: what a handle saves is left aside but where that is what is tested.
    flags: { ...anyPort, 'reuse-min-saved-tokens': '0', ...flags },
    env,
    known: KNOWN,
    terminal: false,
  };
}

/** Settings that must be without a mistake. */
export function checked(loaded: LoadResult): Loaded {
  if (loaded.kind === 'error') throw new Error(JSON.stringify(loaded.problems));
  return loaded;
}

/** The configuration of flags and a file, as `baton serve` would load it. */
export function configOf(
  flags: Readonly<Record<string, string | readonly string[]>>,
  yaml?: string,
  env: Readonly<Record<string, string>> = {},
): Config {
  const file = yaml === undefined ? {} : { fileText: yaml, fileName: 'test.yaml' };
  const input = loadInput(flags, env);
  const { config } = checked(loadConfig({ ...input, ...file }));
  origins.set(config, { flags: input.flags, yaml, env });
  return config;
}

/** What a configuration was made from, for a process that makes it again. */
const origins = new WeakMap<Config, Settings>();

/**
 * Starts baton with a log that the test can read: in this process, or, with BATON_BIN, as that executable where the
 * configuration is as {@link configOf} made it.
 */
export async function startQuietly(
  config: Config,
  reload?: ReloadSource,
): Promise<{ baton: Running; log: Record<string, unknown>[] }> {
  const log: Record<string, unknown>[] = [];
  const settings = process.env['BATON_BIN'] === undefined || reload !== undefined ? undefined : origins.get(config);
  if (settings !== undefined) return { baton: await startExecutable(settings, log), log };
  const destination = { write: (line: string) => log.push(JSON.parse(line)) };
  const logger = createLogger({ level: 'debug', format: 'json', destination });
  const baton = await startBaton(config, { log: logger, ...(reload === undefined ? {} : { reload }) });
  return { baton, log };
}

/** Starts engines and baton; defaults: two of each pool, one plain engine. */
export async function startHarness(options: HarnessOptions = {}): Promise<Harness> {
  await using stack = new AsyncDisposableStack();
  const engine = { ...options.engine };
  const startPool = (role: 'prefill' | 'decode', count: number) =>
    Promise.all(
      Array.from({ length: count }, async (_, index) => {
        const sim = await startSim({ ...engine, ...options.engineOf?.(role, index), role });
        stack.defer(() => sim.close());
        return sim;
      }),
    );
  const prefill = await startPool('prefill', options.prefill ?? 2);
  const decode = await startPool('decode', options.decode ?? 2);
  // The test's own client does not repeat a request whose idle connection ends at that moment.
  const plain = await startSim({ ...engine, role: 'both', connector: 'none', keepAliveMs: 3_600_000 });
  stack.defer(() => plain.close());
  const flags = {
    prefill: prefill.map(({ url }) => url),
    decode: decode.map(({ url }) => url),
    ...options.flags,
  };
  const config = configOf(flags, options.yaml, options.env);
  const { baton, log } = await startQuietly(config);
  stack.defer(() => baton.stop());
  const resources = stack.move();
  const { facade, admin, rpc } = baton.addresses;
  const url = `http://${facade}`;
  return {
    url,
    adminUrl: `http://${admin}`,
    rpcUrl: `http://${rpc}`,
    prefill,
    decode,
    plain,
    log,
    config,
    async ready() {
      const engines = prefill.length + decode.length;
      for (;;) {
        const health = (await (await fetch(`${url}/health`)).json()) as { instances: { ready?: number } };
        if (health.instances.ready === engines) return;
        await new Promise((next) => setTimeout(next, 20));
      }
    },
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

/** A reply read to its end. */
export interface Reply {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
}

/** Posts JSON (an object, or the exact text) and reads the whole reply. */
export async function post(url: string, body: unknown, init: RequestInit = {}): Promise<Reply> {
  const reply = await fetch(url, {
    method: 'POST',
    body: typeof body === 'string' ? body : JSON.stringify(body),
    ...init,
    headers: { 'content-type': 'application/json', ...(init.headers as Record<string, string> | undefined) },
  });
  return { status: reply.status, headers: reply.headers, text: await reply.text() };
}

/** Text, finish reasons and usage of a reply, streamed or not. */
export interface Content {
  readonly texts: readonly string[];
  readonly finish: readonly (string | null)[];
  readonly usage: unknown;
  readonly errors: readonly unknown[];
  readonly done: boolean;
}

/** Reads what a client would see of a reply. */
export function contentOf(raw: string): Content {
  const streamed = raw.startsWith('data:') || raw.startsWith(':');
  const replies: unknown[] = streamed
    ? raw.split('\n\n').flatMap((event) => (event.startsWith('data: {') ? [JSON.parse(event.slice(6))] : []))
    : [JSON.parse(raw)];
  const texts: string[] = [];
  const finish: (string | null)[] = [];
  const errors: unknown[] = [];
  let usage: unknown;
  for (const reply of replies as ChatReply[]) {
    if (reply.error !== undefined) errors.push(reply.error);
    for (const choice of reply.choices ?? []) {
      const piece = choice.delta?.content ?? choice.message?.content ?? choice.text ?? '';
      texts[choice.index] = (texts[choice.index] ?? '') + piece;
      finish[choice.index] = choice.finish_reason ?? finish[choice.index] ?? null;
    }
    if (reply.usage) usage = reply.usage;
  }
  return { texts, finish, usage, errors, done: raw.endsWith('data: [DONE]\n\n') };
}

interface ChatReply {
  readonly error?: unknown;
  readonly usage?: unknown;
  readonly choices?: readonly {
    readonly index: number;
    readonly text?: string;
    readonly delta?: { readonly content?: string | null };
    readonly message?: { readonly content?: string | null };
    readonly finish_reason?: string | null;
  }[];
}
