import { randomBytes, randomInt, randomUUID } from 'node:crypto';
import { internalError } from './api-error.ts';
import { realClock, sleepOn } from './clock.ts';
import { Engine } from './engine.ts';
import { createRandom, FaultBook, type FaultRule, readFault } from './faults.ts';
import { type Exchange, HttpFront, type RecordedRequest, resetSocket, sendJson, sendText } from './http-front.ts';
import { isObject, type JsonObject } from './json.ts';
import { resolveOptions, type SimConfig, type SimOptions, type SimRole } from './options.ts';
import type { ReceiverPorts } from './pd-buffer.ts';
import { answer, type RouteContext } from './routes.ts';
import type { EngineStats } from './stats.ts';

/** What a simulated engine reports about itself; counters are of the current engine life. */
export interface SimState extends EngineStats {
  readonly engineId: string;
  readonly role: SimRole;
  readonly url: string;
  /** Live pins of either kind, leaked ones included. */
  readonly pins: number;
  readonly pinnedBlocks: number;
  readonly pinList: readonly {
    readonly requestId: string;
    readonly kind: string;
    readonly blocks: number;
    readonly tokens: number;
  }[];
  readonly pinsExpired: number;
  readonly freeBlocks: number;
  readonly usage: number;
  readonly running: number;
  readonly waiting: number;
  readonly loading: number;
  /** Requests that hang at this moment; `hung` counts all of them. */
  readonly hanging: number;
  /** Prompts in the buffer of an LMCache decode engine. */
  readonly buffered: number;
  /** Transfers of an LMCache prefill engine that failed. */
  readonly transfersFailed: number;
  readonly killed: boolean;
  readonly paused: boolean;
  readonly deathReason: string | null;
  readonly listening: boolean;
  readonly starts: number;
  /** Generate requests received by this process, all lives. */
  readonly requests: number;
  readonly faults: readonly JsonObject[];
}

/** A running simulated engine. */
export interface Sim {
  readonly url: string;
  readonly port: number;
  readonly sideChannel: { readonly host: string; readonly port: number };
  /** Where a decode engine with the LMCache connector takes KV. */
  readonly receiverPorts: ReceiverPorts;
  readonly role: SimRole;
  /** The engine id of the current life. */
  readonly engineId: string;
  /** Requests as received, with `recordRequests`; /sim routes are left out. */
  readonly requests: readonly RecordedRequest[];
  state(): SimState;
  /** Adds a fault; `refuse` has closed the listener and `pause` stopped the process when this resolves. */
  setFault(rule: FaultRule): Promise<void>;
  /** Drops all faults, listens again if a `refuse` fault had stopped it, and goes on after a `pause`. */
  clearFaults(): Promise<void>;
  /** The process dies: connections are reset, then refused; KV and pins are gone. */
  crash(): Promise<void>;
  /** Starts a new life on the same ports: new engine id, empty KV, faults kept. */
  restart(): Promise<void>;
  close(): Promise<void>;
}

function textOf(value: unknown, member: string): string {
  const text = isObject(value) ? value[member] : undefined;
  return typeof text === 'string' ? text : '';
}

function drawHex(digits: number): string {
  return randomBytes(digits / 2).toString('hex');
}

/** Milliseconds in which an engine that goes on can still read for clients that have left. */
const LEFT_UNSEEN_MS = 50;

class RunningSim implements Sim {
  readonly role: SimRole;
  readonly requests: RecordedRequest[] = [];
  private engine: Engine;
  private readonly config: SimConfig;
  private readonly front: HttpFront;
  private readonly faults: FaultBook;
  private sidePort: number;
  private receiver: ReceiverPorts;
  private starts = 1;
  private received = 0;
  private startedAt = 0;
  private killed = false;
  private closed = false;
  private changing: Promise<void> = Promise.resolve();

  constructor(config: SimConfig) {
    this.config = config;
    this.role = config.role;
    this.faults = new FaultBook(createRandom(config.seed ?? randomInt(2 ** 32)));
    this.sidePort = config.sidePort;
    this.receiver = { init: config.initPorts, alloc: config.allocPorts };
    this.engine = this.createEngine(config.engineId);
    this.front = new HttpFront(
      config.host,
      config.port,
      config.keepAliveMs,
      (exchange) => this.handle(exchange),
      config.recordRequests
        ? (request) => {
            if (!request.path.startsWith('/sim/')) this.requests.push(request);
          }
        : undefined,
      (notice) => this.noticeLeave(notice),
    );
  }

  get url(): string {
    const { host } = this.config;
    return `http://${host.includes(':') ? `[${host}]` : host}:${this.front.port}`;
  }

  get port(): number {
    return this.front.port;
  }

  get engineId(): string {
    return this.engine.engineId;
  }

  get sideChannel(): { readonly host: string; readonly port: number } {
    return { host: this.config.advertiseHost ?? this.config.sideHost, port: this.engine.sidePort };
  }

  get receiverPorts(): ReceiverPorts {
    return this.receiver;
  }

  async start(): Promise<void> {
    await this.engine.listen(this.sidePort, this.receiver);
    this.sidePort = this.engine.sidePort;
    this.receiver = this.engine.receiver;
    try {
      await this.front.listen();
    } catch (error) {
      await this.engine.stop();
      throw error;
    }
  }

  state(): SimState {
    const { engine } = this;
    const pins = engine.pins.list();
    return {
      ...engine.stats,
      engineId: engine.engineId,
      role: this.role,
      url: this.url,
      pins: pins.length,
      pinnedBlocks: pins.reduce((sum, pin) => sum + pin.blocks.length, 0),
      pinList: pins.map((pin) => ({
        requestId: pin.requestId,
        kind: pin.kind,
        blocks: pin.blocks.length,
        tokens: pin.tokens,
      })),
      pinsExpired: engine.pins.expired,
      freeBlocks: engine.pool.freeCount,
      usage: engine.pool.usage,
      running: engine.countPhase('running'),
      waiting: engine.countPhase('waiting'),
      loading: engine.countPhase('loading'),
      hanging: engine.countPhase('hung'),
      buffered: engine.lmcache?.buffer.size ?? 0,
      transfersFailed: engine.lmcache?.sender.failed ?? 0,
      killed: this.killed,
      paused: this.config.switch.isPaused,
      deathReason: engine.deathReason ?? null,
      listening: this.front.isListening,
      starts: this.starts,
      requests: this.received,
      faults: this.faults.list(),
    };
  }

  async setFault(rule: FaultRule): Promise<void> {
    this.faults.add(rule);
    if (rule.kind === 'refuse') await this.startRefusal(rule.ms);
    if (rule.kind === 'pause') this.startPause(rule.ms);
  }

  async clearFaults(): Promise<void> {
    const refused = this.faults.refuses;
    this.faults.clear();
    this.config.switch.resume();
    if (refused) await this.listenAgain();
  }

  crash(): Promise<void> {
    return this.change(async () => {
      this.killed = true;
      await this.front.stopListening();
      await this.front.resetAll(false);
      await this.engine.stop();
      this.config.switch.resume();
      this.config.onExit?.('crash');
    });
  }

  restart(): Promise<void> {
    return this.change(async () => {
      if (this.closed) return;
      await this.front.stopListening();
      await this.front.resetAll(false);
      await this.engine.stop();
      this.config.switch.resume();
      this.engine = this.createEngine(undefined);
      this.starts += 1;
      this.killed = false;
      await this.engine.listen(this.sidePort, this.receiver);
      if (!this.faults.refuses) await this.front.listen();
    });
  }

  close(): Promise<void> {
    this.closed = true;
    return this.change(async () => {
      await this.front.stopListening();
      await this.front.resetAll(false);
      await this.engine.stop();
      this.config.switch.resume();
    });
  }

  /** A process that stood still works on what it had before it hears who has left. */
  private noticeLeave(notice: () => void): void {
    if (!this.config.switch.isPaused) notice();
    else this.config.switch.run(() => realClock.setTimeout(notice, LEFT_UNSEEN_MS));
  }

  private startPause(ms: number | undefined): void {
    this.config.switch.pause();
    // Not the engine's clock, which stands still.
    if (ms !== undefined) realClock.setTimeout(() => this.config.switch.resume(), ms);
  }

  private async startRefusal(ms: number | undefined): Promise<void> {
    await this.change(() => this.front.stopListening());
    if (ms === undefined) return;
    this.config.clock.setTimeout(() => {
      this.faults.endRefusal();
      void this.listenAgain();
    }, ms);
  }

  private listenAgain(): Promise<void> {
    return this.change(async () => {
      if (!this.killed && !this.closed && !this.faults.refuses && !this.front.isListening) await this.front.listen();
    });
  }

  /** Listener changes run one after another. */
  private change(work: () => Promise<void>): Promise<void> {
    const next = this.changing.then(work);
    this.changing = next.catch(() => undefined);
    return next;
  }

  private createEngine(engineId: string | undefined): Engine {
    // Start times have steps of 10 ms and tell two lives apart.
    this.startedAt = Math.max(this.config.clock.now(), this.startedAt + 10);
    return new Engine(this.config, engineId ?? randomUUID(), this.startedAt, (silent) => {
      if (silent !== undefined) {
        for (const exchange of this.front.open) {
          exchange.isSilent ||= exchange.suffix !== '' && silent.internalId.endsWith(`-${exchange.suffix}`);
        }
      }
      this.killed = true;
      const dying = this.engine;
      void this.change(async () => {
        if (this.engine === dying) await this.exitAfterDeath();
      });
    });
  }

  /** The engine core is dead: open requests get their 500s, then the process is gone. */
  private async exitAfterDeath(): Promise<void> {
    const { engine } = this;
    for (let turn = 0; turn < 50 && [...this.front.open].some((exchange) => !exchange.isSilent); turn += 1) {
      await new Promise((resolve) => setImmediate(resolve));
    }
    await this.front.stopListening();
    await this.front.resetAll(true);
    await engine.stop();
    this.config.onExit?.(engine.deathReason ?? '');
  }

  private async handle(exchange: Exchange): Promise<void> {
    const { request, parsed, response, signal } = exchange;
    if (request.path === '/sim/state' && request.method === 'GET') {
      sendJson(response, 200, this.state());
      return;
    }
    if (request.path === '/sim/fault' && request.method === 'POST') {
      await this.receiveFault(exchange);
      return;
    }
    if (this.config.switch.isPaused) await this.config.switch.passed();
    if (signal.aborted) return;
    if (request.method === 'POST' && /^\/v1\/(chat\/)?completions$/.test(request.path)) this.received += 1;
    const model = textOf(parsed, 'model');
    const remote = isObject(parsed) ? textOf(parsed['kv_transfer_params'], 'remote_engine_id') : '';
    const { method, leg, path, onConnection } = request;
    const fault = this.faults.match({ method, leg, path, model, remote, isReused: onConnection > 1 });
    const proceeds = fault === undefined || (await this.applyFault(exchange, fault));
    if (!proceeds || signal.aborted) return;
    const context: RouteContext = {
      engine: this.engine,
      config: this.config,
      fault,
      drawHex,
      load: this.front.open.size - 1,
    };
    await answer(exchange, context);
  }

  /** Carries out what a fault does before the request is looked at; true if the request goes on. */
  private async applyFault(exchange: Exchange, fault: FaultRule): Promise<boolean> {
    const { response, socket, signal } = exchange;
    switch (fault.kind) {
      case 'status': {
        for (const [name, value] of Object.entries(fault.headers ?? {})) response.setHeader(name, value);
        const status = fault.status ?? 500;
        if (typeof fault.body === 'string') sendText(response, status, 'text/plain; charset=utf-8', fault.body);
        else sendJson(response, status, fault.body ?? internalError().body);
        return false;
      }
      case 'reset':
      case 'reset_reused':
        resetSocket(socket);
        return false;
      case 'stall':
        await sleepOn(this.config.clock, fault.ms ?? 1000, signal);
        return true;
      case 'hang':
        await new Promise<void>((resolve) => {
          if (signal.aborted) resolve();
          signal.addEventListener('abort', () => resolve());
        });
        return false;
      case 'kill':
        await this.crash();
        if (fault.ms !== undefined) this.config.clock.setTimeout(() => void this.restart(), fault.ms);
        return false;
      case 'restart':
        await this.restart();
        return false;
      case 'crash':
        this.engine.die('injected');
        return true;
      default:
        return true;
    }
  }

  private async receiveFault(exchange: Exchange): Promise<void> {
    const { parsed, response } = exchange;
    if (isObject(parsed) && parsed['kind'] === 'clear') {
      await this.clearFaults();
      sendJson(response, 200, { faults: this.faults.list() });
      return;
    }
    const rule = readFault(parsed);
    if (rule === undefined) {
      sendJson(response, 400, { error: 'not a fault' });
      return;
    }
    if (rule.kind !== 'refuse') await this.setFault(rule);
    else this.faults.add(rule);
    sendJson(response, 200, { faults: this.faults.list() });
    if (rule.kind === 'refuse') await this.startRefusal(rule.ms);
  }
}

/** Starts a simulated engine; resolves when both ports listen, rejects if one is in use. */
export async function startSim(options: SimOptions = {}): Promise<Sim> {
  const sim = new RunningSim(resolveOptions(options));
  await sim.start();
  return sim;
}
