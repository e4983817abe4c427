import { hash } from 'node:crypto';
import { Cluster, Redis, type RedisOptions } from 'iovalkey';
import type { BatonError } from '../../core/errors.ts';
import { storeUnavailable } from '../refusals.ts';
import type { StoreNotice, ValkeyOptions } from '../store.ts';
import { causeOf, isTls, noAnswer } from './cause.ts';
import { Reply } from './reply.ts';
import { type Argument, type Runner, runnerOf, ScriptCall, type Words, wordsOf } from './script-call.ts';
import { type ScriptName, scriptText } from './scripts.ts';
import { checkServer } from './server-check.ts';

/** Milliseconds. */
const COMMAND_MS = 1000;
const CONNECT_MS = 1000;
const PROBE_MS = 250;
const RECONNECT_MAX_MS = 1000;
/** A connection that answers nothing for so long is made anew. */
const DEAF_MS = 5000;

type Client = Pick<Redis, 'callBuffer' | 'info' | 'config' | 'select'> & {
  readonly sendCommand: (call: ScriptCall) => unknown;
  readonly connect: () => Promise<void>;
  readonly disconnect: (reconnect?: boolean) => void;
  readonly on: (event: 'error' | 'close', listener: (error?: unknown) => void) => unknown;
};

const scripts = new Map<string, { readonly text: string; readonly bySha: Runner }>();

/** What a link is made from. */
export interface LinkOptions {
  readonly settings: ValkeyOptions;
  readonly password: string | undefined;
  readonly ca: string | undefined;
  /** Bounds of the release queue, which every script gets. */
  readonly queueEntries: number;
  readonly queueBytes: number;
  readonly onNotice: (notice: StoreNotice) => void;
}

/**
 * The connection to the server. While the server is away calls fail at once instead of waiting, one probe at a time looks
 * for it, and nothing that was sent is sent again: only the caller knows whether it may be.
 */
export class Link {
  readonly #options: LinkOptions;
  readonly #client: Client;
  /** What all names begin with. */
  readonly #base: string;
  readonly #main: string;
  #run = '';
  #leading: { readonly run: string; readonly words: Words } | undefined;
  #earlier: readonly string[] = [];
  #isUp = false;
  #downSince = performance.now();
  #told: 'up' | 'down' | undefined;
  readonly #db: number;
  #refusal: BatonError | undefined;
  #cause = '';
  #checked = false;
  #probing: Promise<void> | undefined;
  #timer: NodeJS.Timeout | undefined;
  #isOpen = false;
  #closed = false;
  /** Whether it was told that the password is not needed. */
  #needless = false;

  constructor(options: LinkOptions) {
    this.#options = options;
    this.#base = `{${options.settings.prefix}}:`;
    this.#main = `${this.#base}m`;
    this.#db = options.settings.cluster ? 0 : dbOf(options.settings.url);
    this.#client = clientOf(options);
    tellOfNeedlessPassword(this.#client, () => {
      if (!this.#needless) this.#notice('warn', 'the valkey server wants no password, and is given one');
      this.#needless = true;
    });
    this.#client.on('error', (error) => this.#noteCause(error));
    this.#client.on('close', () => this.#lost());
  }

  /** The run of the server: its process, its history and its clock. Empty until it was reached. */
  get run(): string {
    return this.#run;
  }

  /** Earlier runs whose names may still be there. */
  get earlier(): readonly string[] {
    return this.#earlier;
  }

  /** Why this server cannot be used at all, such as its age. */
  get refusal(): BatonError | undefined {
    return this.#refusal;
  }

  /** Looks for the server once, and from then on whenever it is away. */
  async open(): Promise<void> {
    this.#client.connect().catch(() => {});
    const until = performance.now() + CONNECT_MS;
    while (!this.#isUp && this.#refusal === undefined && performance.now() < until) {
      await this.#probe();
      if (!this.#isUp) await new Promise((resolve) => setTimeout(resolve, 20));
    }
    if (!this.#isUp && this.#refusal === undefined) this.#tell('down');
    this.#isOpen = true;
    this.#watch();
  }

  close(): void {
    this.#closed = true;
    this.#isUp = false;
    clearTimeout(this.#timer);
    this.#client.disconnect(false);
  }

  /**
   * Runs a script under the run of the server as it is now. `replay` is the name of the call's answer below the run.
   * Throws STORE_UNAVAILABLE if the server does not answer; the step may have happened all the same.
   */
  async step(name: ScriptName, args: readonly Argument[], replay?: string): Promise<Reply> {
    if (!this.#isUp) throw this.#refusal ?? storeUnavailable('the valkey server does not answer');
    const first = await this.#guarded(name, args, replay);
    if (first.text(0) !== 'run') return first;
    // Nothing was done: the server is another one, or has another history.
    await this.#hello();
    // A cluster client may have sent it twice, and the first may have happened before the change.
    if (this.#options.settings.cluster && name === 'put') throw storeUnavailable('the valkey server was replaced');
    const second = await this.#guarded(name, args, replay);
    if (second.text(0) === 'run') throw storeUnavailable('the valkey server is being replaced');
    return second;
  }

  async #guarded(name: ScriptName, args: readonly Argument[], replay: string | undefined): Promise<Reply> {
    const keys = replay === undefined ? [this.#main] : [this.#main, `${this.#base}${this.#run}:${replay}`];
    try {
      return await this.#eval(name, keys, this.#lead(), args);
    } catch (error) {
      this.#noteCause(error);
      if (error instanceof Error && error.message.startsWith('OOM')) {
        throw storeUnavailable('the valkey server has no memory left', error);
      }
      this.#failed();
      throw storeUnavailable('the valkey server does not answer', error);
    }
  }

  async #eval(
    name: ScriptName | 'hello',
    keys: readonly string[],
    lead: Words,
    args: readonly Argument[],
  ): Promise<Reply> {
    const { bySha, text } = scriptOf(name);
    try {
      return new Reply(await this.#answer(new ScriptCall(bySha, keys, lead, args)));
    } catch (error) {
      if (!(error instanceof Error) || !error.message.startsWith('NOSCRIPT')) throw error;
      return new Reply(await this.#answer(new ScriptCall(runnerOf('eval', text), keys, lead, args)));
    }
  }

  /** Sends a call; resolves with its answer. */
  #answer(call: ScriptCall): Promise<unknown> {
    this.#client.sendCommand(call);
    return call.answer();
  }

  /** What every script is given first. */
  #lead(): Words {
    const { settings, queueEntries, queueBytes } = this.#options;
    const now = settings.clock === undefined ? '' : String(Math.floor(settings.clock()));
    if (this.#leading?.run !== this.#run || now !== '') {
      const words = wordsOf([this.#run, now, String(queueEntries), String(queueBytes)]);
      this.#leading = { run: this.#run, words };
    }
    return this.#leading.words;
  }

  async #hello(): Promise<void> {
    const reply = await this.#eval('hello', [this.#main, `${this.#base}runs`], this.#lead(), []);
    const run = reply.text(1);
    if (this.#run !== '' && this.#run !== run) {
      this.#notice('warn', 'the valkey server restarted or was replaced: its entries are not given any more');
    }
    this.#run = run;
    this.#earlier = reply
      .list(2)
      .texts()
      .filter((earlier) => earlier !== run);
  }

  async #probe(): Promise<void> {
    this.#probing ??= this.#look().finally(() => {
      this.#probing = undefined;
    });
    await this.#probing;
  }

  async #look(): Promise<void> {
    try {
      if (!this.#checked) {
        const { refusal, warnings } = await checkServer(this.#client, this.#db);
        // Whoever opens the link is told by its refusal.
        const isNews = this.#isOpen && this.#refusal === undefined;
        if (refusal !== undefined && isNews) this.#notice('error', refusal.message);
        this.#refusal = refusal;
        if (refusal !== undefined) return;
        for (const warning of warnings) this.#notice('warn', warning);
        this.#checked = true;
      }
      await this.#hello();
      if (this.#closed) return;
      this.#isUp = true;
      this.#cause = '';
      this.#tell('up');
    } catch (error) {
      this.#noteCause(error);
      if (performance.now() - this.#downSince < DEAF_MS) return;
      this.#downSince = performance.now();
      if (!this.#closed) this.#client.disconnect(true);
    }
  }

  #watch(): void {
    if (this.#closed) return;
    this.#timer = setTimeout(() => {
      if (this.#isUp) this.#watch();
      else void this.#probe().finally(() => this.#watch());
    }, PROBE_MS);
    this.#timer.unref();
  }

  #lost(): void {
    // The next connection may lead to another server.
    this.#checked = false;
    this.#failed();
  }

  #failed(): void {
    if (!this.#isUp || this.#closed) return;
    this.#isUp = false;
    this.#downSince = performance.now();
    this.#tell('down');
  }

  /** Tells once per change. */
  #tell(state: 'up' | 'down'): void {
    const before = this.#told;
    this.#told = state;
    if (before === state || (before === undefined && state === 'up')) return;
    if (state === 'up') this.#notice('info', 'the valkey server is back');
    else
      this.#notice(
        'warn',
        'the valkey server does not answer: nothing is stored or found until it does',
        this.#cause === '' ? noAnswer(this.#options.settings) : this.#cause,
      );
  }

  #noteCause(error: unknown): void {
    const cause = causeOf(error, this.#options.settings);
    if (cause !== undefined) this.#cause = cause;
  }

  #notice(level: StoreNotice['level'], message: string, cause = ''): void {
    this.#options.onNotice({ level, message, ...(cause === '' ? {} : { fields: { cause } }) });
  }
}

function scriptOf(name: ScriptName | 'hello'): { readonly text: string; readonly bySha: Runner } {
  const known = scripts.get(name);
  if (known !== undefined) return known;
  const text = scriptText(name);
  const script = { text, bySha: runnerOf('evalsha', hash('sha1', text)) };
  scripts.set(name, script);
  return script;
}

/** Database in the URL, 0 without one. */
function dbOf(url: string): number {
  return Number(new URL(url).pathname.slice(1));
}

/** The client would write to standard error of a password that its server does not want; a cluster's nodes still do. */
function tellOfNeedlessPassword(client: object, tell: () => void): void {
  if (!(client instanceof Redis)) return;
  const { auth } = client;
  const value = (credential: unknown, done: (error: unknown) => void): unknown => {
    const heard = (error: unknown) => {
      const isNeedless =
        error instanceof Error && /no password is set|without any password configured/.test(error.message);
      if (isNeedless) tell();
      done(isNeedless ? null : error);
    };
    return Reflect.apply(auth, client, [credential, heard]);
  };
  Object.defineProperty(client, 'auth', { value });
}

function clientOf({ settings, password, ca }: LinkOptions): Client {
  const url = new URL(settings.url);
  const secret = password ?? (url.password === '' ? undefined : decodeURIComponent(url.password));
  const db = dbOf(settings.url);
  const address = { host: url.hostname.replace(/^\[(.*)\]$/, '$1'), port: Number(url.port || 6379) };
  const common: RedisOptions = {
    ...(url.username === '' ? {} : { username: decodeURIComponent(url.username) }),
    ...(secret === undefined ? {} : { password: secret }),
    ...(isTls(settings) ? { tls: ca === undefined ? {} : { ca } } : {}),
    lazyConnect: true,
    enableOfflineQueue: false,
    enableReadyCheck: false,
    autoResendUnfulfilledCommands: false,
    // What is under way fails with its connection.
    maxRetriesPerRequest: 0,
    connectTimeout: CONNECT_MS,
    commandTimeout: COMMAND_MS,
    keepAlive: 10_000,
    retryStrategy,
    // A primary that became a replica: the name, or the sentinels, lead to the new one.
    reconnectOnError: (error) => error.message.includes('READONLY'),
  };
  if (settings.cluster) {
    return new Cluster([address], {
      redisOptions: common,
      clusterRetryStrategy: retryStrategy,
      lazyConnect: true,
      enableOfflineQueue: false,
    });
  }
  if (settings.sentinels.length === 0) return new Redis({ ...common, ...address, db });
  const sentinels = settings.sentinels.map((text) => {
    const at = text.lastIndexOf(':');
    return { host: text.slice(0, at), port: Number(text.slice(at + 1)) };
  });
  return new Redis({ ...common, sentinels, name: settings.sentinelName, sentinelRetryStrategy: retryStrategy, db });
}

function retryStrategy(times: number): number {
  return Math.min(50 * times, RECONNECT_MAX_MS);
}
