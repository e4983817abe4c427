import { randomBytes, randomInt, randomUUID } from 'node:crypto';
import { badRequest, internalError } from './api-error.ts';
import type { TemplateKind } from './chat-template.ts';
import { realClock, sleepOn } from './clock.ts';
import { Engine } from './engine.ts';
import { createRandom, FaultBook, type FaultRule, readFault } from './faults.ts';
import { type Exchange, HttpFront, type RecordedRequest, resetSocket, sendJson, sendText } from './http-front.ts';
import { isObject } from './json.ts';
import { resolveOptions, type SimConfig, type SimOptions, type SimRole } from './options.ts';
import type { ReceiverPorts } from './pd-buffer.ts';
import { answer, type RouteContext } from './routes.ts';
import { coreState, DIED_WITH, type SimState } from './state.ts';

/** A running simulated engine. */
export interface Sim {
  readonly url: string;
  readonly port: number;
  readonly sideChannel: { readonly host: string; readonly port: number };
  /** Where a decode engine with the LMCache connector takes KV. */
  readonly receiverPorts: ReceiverPorts;
  readonly role: SimRole;
  /** The engine id of the current life, of the first data parallel rank. */
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
  /** Starts a new life on the same ports: new engine id, empty KV, faults kept; with another chat template, if one is named. */
  restart(template?: TemplateKind): Promise<void>;
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
const LEFT_UNSEEN_MS = 200;

class RunningSim implements Sim {
  readonly role: SimRole;
  readonly requests: RecordedRequest[] = [];
  /** One a data parallel rank. */
  private engines: readonly Engine[];
  private config: SimConfig;
  private readonly front: HttpFront;
  private readonly faults: FaultBook;
  private sidePorts: readonly number[];
  private receiver: ReceiverPorts;
  private starts = 1;
  private received = 0;
  private readonly rankRequests: number[];
  private startedAt = 0;
  private killed = false;
  private closed = false;
  private changing: Promise<void> = Promise.resolve();

  constructor(config: SimConfig) {
    this.config = config;
    this.role = config.role;
    this.faults = new FaultBook(createRandom(config.seed ?? randomInt(2 ** 32)));
    const { sidePort, dataParallel } = config;
    this.rankRequests = Array.from({ length: dataParallel }, () => 0);
    this.sidePorts = Array.from({ length: dataParallel }, (_, rank) => (sidePort === 0 ? 0 : sidePort + rank));
    this.receiver = { init: config.initPorts, alloc: config.allocPorts };
    this.engines = this.createEngines(config.engineId);
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
    return this.engines[0]?.engineId ?? '';
  }

  get sideChannel(): { readonly host: string; readonly port: number } {
    return { host: this.config.advertiseHost ?? this.config.sideHost, port: this.sidePorts[0] ?? 0 };
  }

  get receiverPorts(): ReceiverPorts {
    return this.receiver;
  }

  async start(): Promise<void> {
    await this.listenSides();
    try {
      await this.front.listen();
    } catch (error) {
      await this.stopEngines();
      throw error;
    }
  }

  state(): SimState {
    return {
      ...coreState(this.engines),
      role: this.role,
      url: this.url,
      killed: this.killed,
      paused: this.config.switch.isPaused,
      listening: this.front.isListening,
      starts: this.starts,
      requests: this.received,
      rankRequests: [...this.rankRequests],
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
      await this.stopEngines();
      this.config.switch.resume();
      this.config.onExit?.('crash');
    });
  }

  restart(template?: TemplateKind): Promise<void> {
    return this.change(async () => {
      if (this.closed) return;
      await this.front.stopListening();
      await this.front.resetAll(false);
      await this.stopEngines();
      this.config.switch.resume();
      if (template !== undefined) this.config = { ...this.config, template };
      this.engines = this.createEngines(undefined);
      this.starts += 1;
      this.killed = false;
      await this.listenSides();
      if (!this.faults.refuses) await this.front.listen();
    });
  }

  close(): Promise<void> {
    this.closed = true;
    return this.change(async () => {
      await this.front.stopListening();
      await this.front.resetAll(false);
      await this.stopEngines();
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

  private async listenSides(): Promise<void> {
    for (const [rank, engine] of this.engines.entries()) {
      await engine.listen(this.sidePorts[rank] ?? 0, this.receiver);
      this.receiver = engine.receiver;
    }
    this.sidePorts = this.engines.map(({ sidePort }) => sidePort);
  }

  private async stopEngines(): Promise<void> {
    await Promise.all(this.engines.map((engine) => engine.stop()));
  }

  /** With several ranks each has the base id and its number, as vLLM names them. */
  private createEngines(engineId: string | undefined): readonly Engine[] {
    // Start times have steps of 10 ms and tell two lives apart.
    this.startedAt = Math.max(this.config.clock.now(), this.startedAt + 10);
    const base = engineId ?? randomUUID();
    const { dataParallel } = this.config;
    const engines: readonly Engine[] = Array.from(
      { length: dataParallel },
      (_, rank) =>
        new Engine(this.config, dataParallel === 1 ? base : `${base}_dp${rank}`, this.startedAt, (silent) => {
          if (silent !== undefined) {
            for (const exchange of this.front.open) {
              exchange.isSilent ||= exchange.suffix !== '' && silent.internalId.endsWith(`-${exchange.suffix}`);
            }
          }
          this.killed = true;
          // The process goes with the first of its cores.
          for (const other of engines) other.die(DIED_WITH);
          void this.change(async () => {
            if (this.engines === engines) await this.exitAfterDeath();
          });
        }),
    );
    return engines;
  }

  /** The engine core is dead: open requests get their 500s, then the process is gone. */
  private async exitAfterDeath(): Promise<void> {
    const { engines } = this;
    for (let turn = 0; turn < 50 && [...this.front.open].some((exchange) => !exchange.isSilent); turn += 1) {
      await new Promise((resolve) => setImmediate(resolve));
    }
    await this.front.stopListening();
    await this.front.resetAll(true);
    await Promise.all(engines.map((engine) => engine.stop()));
    this.config.onExit?.(coreState(engines).deathReason ?? '');
  }

  /** The rank that a request names, else each in turn; undefined for one that there is not. */
  private pickRank(header: string | string[] | undefined): number | undefined {
    const { length } = this.engines;
    if (typeof header !== 'string' || !/^\d+$/.test(header)) return this.received % length;
    return Number(header) < length ? Number(header) : undefined;
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
    const isGenerate = request.method === 'POST' && /^\/v1\/(chat\/)?completions$/.test(request.path);
    if (isGenerate) this.received += 1;
    const model = textOf(parsed, 'model');
    const remote = isObject(parsed) ? textOf(parsed['kv_transfer_params'], 'remote_engine_id') : '';
    const { method, leg, path, onConnection } = request;
    const fault = this.faults.match({ method, leg, path, model, remote, isReused: onConnection > 1 });
    const proceeds = fault === undefined || (await this.applyFault(exchange, fault));
    if (!proceeds || signal.aborted) return;
    const rank = this.pickRank(request.headers['x-data-parallel-rank']);
    const engine = this.engines[rank ?? 0];
    if (engine === undefined || rank === undefined) {
      const error = badRequest(`data_parallel_rank ${String(request.headers['x-data-parallel-rank'])} is out of range`);
      sendJson(response, error.status, error.body);
      return;
    }
    if (isGenerate) this.rankRequests[rank] = (this.rankRequests[rank] ?? 0) + 1;
    const context: RouteContext = {
      engine,
      engines: this.engines,
      config: this.config,
      serve: (models) => {
        this.config = { ...this.config, models };
      },
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
        this.engines[0]?.die('injected');
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
