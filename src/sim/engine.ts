import { BlockPool } from './blocks.ts';
import { type SimClock, sleepOn } from './clock.ts';
import { buildHandle } from './handle.ts';
import { startHeartbeat } from './heartbeat.ts';
import { isObject, isTruthy } from './json.ts';
import { type KvLoad, type PullTarget, planLoad, readTarget } from './kv-params.ts';
import { LmcacheSide } from './lmcache-side.ts';
import type { SimConfig } from './options.ts';
import type { ReceiverPorts } from './pd-buffer.ts';
import { PeerService } from './peer-service.ts';
import { PinTable } from './pins.ts';
import { RunQueue } from './run-queue.ts';
import { sampleLetter, sampleThought, sampleToken } from './sampler.ts';
import {
  EngineError,
  type EngineRequest,
  type EngineResult,
  type ForcedToken,
  type Run,
  Sequence,
} from './sequence.ts';
import { SideChannelClient, SideChannelServer } from './side-channel.ts';
import { createStats } from './stats.ts';
import { special } from './tokenizer.ts';

const yieldEvery = 256;

/**
 * One life of an engine: block pool, prefix cache, queue, pins, and the side channel to peers. A restart is a new object.
 * What it answers is a function of the KV its blocks really hold.
 */
export class Engine {
  readonly engineId: string;
  readonly pool: BlockPool;
  readonly pins: PinTable;
  readonly stats = createStats();
  readonly startedAt: number;
  sidePort = 0;
  dead = false;
  deathReason: string | undefined;
  /** Only with the LMCache connector. */
  readonly lmcache: LmcacheSide | undefined;
  receiver: ReceiverPorts = { init: [], alloc: [] };
  private readonly config: SimConfig;
  private readonly clock: SimClock;
  private readonly runs = new Set<Run>();
  private readonly queue: RunQueue;
  private readonly peers = new SideChannelClient();
  private readonly side: SideChannelServer;
  private readonly onDeath: (silent: EngineRequest | undefined) => void;

  constructor(
    config: SimConfig,
    engineId: string,
    startedAt: number,
    onDeath: (silent: EngineRequest | undefined) => void,
  ) {
    this.config = config;
    this.clock = config.clock;
    this.engineId = engineId;
    this.startedAt = startedAt;
    this.onDeath = onDeath;
    this.pool = new BlockPool(config.numBlocks, config.blockSize, config.prefixCaching);
    this.pins = new PinTable(this.pool, config.clock, () => this.queue.pump());
    this.queue = new RunQueue(config.maxNumSeqs, {
      isDead: () => this.dead,
      // Blocks whose time is over are free, even if their timer is late.
      sweep: () => void this.pins.list(),
      startBeats: (run) => startHeartbeat(run.request.kv, this.peers, this.clock, config.kvLeaseMs / 6),
    });
    const service = new PeerService({
      engineId,
      compat: this.compat,
      pool: this.pool,
      pins: this.pins,
      stats: this.stats,
      extendMs: (config.kvLeaseMs * 2) / 3,
      now: () => config.clock.now(),
      monotonicSeconds: () => this.monotonicSeconds(),
    });
    this.side = new SideChannelServer(
      (request) => service.answer(request),
      (act) => config.switch.run(act),
    );
    this.lmcache = config.connector === 'lmcache' ? new LmcacheSide(config, this.compat, this.peers) : undefined;
  }

  /** What two engines must share to exchange KV. */
  get compat(): string {
    const base = this.config.models.find((model) => model.parent === null)?.root ?? '';
    return `${this.config.version} ${base} ${this.config.blockSize} ${this.config.tokenizer}`;
  }

  /** Opens the side channel and the receiver's ports (0 = any); rejects if one is in use. */
  async listen(port: number, receiver: ReceiverPorts): Promise<void> {
    this.sidePort = await this.side.listen(this.config.sideHost, port);
    if (this.lmcache !== undefined) this.receiver = await this.lmcache.listen(receiver);
  }

  /** Ends this life: running requests fail, peers lose their connections, KV is gone. */
  async stop(): Promise<void> {
    this.killRuns(undefined);
    this.pins.clear();
    this.peers.close();
    await this.lmcache?.close();
    await this.side.close();
  }

  /** Requests by phase. */
  countPhase(phase: Run['phase']): number {
    let count = 0;
    for (const run of this.runs) count += run.phase === phase ? 1 : 0;
    return count;
  }

  /** Seconds on this engine's own clock, unrelated to wall time. */
  monotonicSeconds(): number {
    return 1000 + (this.clock.now() - this.startedAt) / 1000;
  }

  /** Runs one request to its end; throws EngineError if the engine gives no result. */
  async run(request: EngineRequest): Promise<EngineResult> {
    if (this.dead) throw new EngineError('dead');
    const run: Run = {
      request,
      sequence: new Sequence(request, this.pool),
      stop: new AbortController(),
      failure: undefined,
      wake: undefined,
      phase: 'waiting',
      scheduled: false,
    };
    const onAbort = (): void => this.fail(run, 'aborted');
    request.signal.addEventListener('abort', onAbort);
    if (request.signal.aborted) onAbort();
    this.runs.add(run);
    try {
      const result = await this.execute(run);
      this.stats.finished[result.finish] += 1;
      return result;
    } catch (error) {
      if (error instanceof EngineError) this.stats.finished[error.kind === 'aborted' ? 'abort' : 'error'] += 1;
      throw error;
    } finally {
      request.signal.removeEventListener('abort', onAbort);
      this.queue.leave(run);
      if (run.phase === 'hung') this.stats.leakedBlocks += run.sequence.blocks.length;
      else if (!this.dead) this.pool.release(run.sequence.blocks);
      run.sequence.blocks = [];
      this.runs.delete(run);
      this.queue.pump();
    }
  }

  /** Tells the producer that a request it prepared will not be read. */
  async notifyUnread(kv: unknown): Promise<void> {
    const target = isObject(kv) ? readTarget(kv) : undefined;
    if (target !== undefined) await this.notifyDone(target);
  }

  /** Ends the engine as an exception in its scheduler does; `silent` is a request that never gets an answer. */
  die(reason: string, silent?: EngineRequest): void {
    if (this.dead) return;
    this.deathReason = reason;
    this.killRuns(silent);
    this.onDeath(silent);
  }

  private killRuns(silent: EngineRequest | undefined): void {
    this.dead = true;
    for (const run of this.runs) if (run.request !== silent) this.fail(run, 'dead');
  }

  private fail(run: Run, failure: 'dead' | 'aborted'): void {
    run.failure ??= failure;
    run.stop.abort();
    run.wake?.();
  }

  private check(run: Run): void {
    if (run.failure !== undefined) throw new EngineError(run.failure);
  }

  private async execute(run: Run): Promise<EngineResult> {
    const { request, sequence } = run;
    const { lmcache } = this;
    const kv = this.config.connector === 'nixl' ? request.kv : undefined;
    const loadsPrompt = kv !== undefined && isTruthy(kv['do_remote_prefill']);
    try {
      await this.queue.admit(run);
      this.check(run);
    } catch (error) {
      if (loadsPrompt && !this.dead) await this.notifyUnread(kv);
      throw error;
    }
    const promptTokens = request.prompt.length;
    this.stats.promptTokens += promptTokens;
    this.stats.prefixQueries += promptTokens;
    this.stats.prefixHits += sequence.hitTokens;

    const fatal = lmcache?.whyFatal(request);
    if (fatal !== undefined) await this.load(run, { kind: 'crash', reason: fatal, silent: false });
    let ready = lmcache?.receive(sequence, request) ?? sequence.hitTokens;
    if (kv !== undefined && !request.skipCache) {
      const load = planLoad(kv, {
        promptTokens,
        localHit: sequence.hitTokens,
        blockSize: this.config.blockSize,
        bidirectional: this.config.bidirectional,
        threshold: this.config.recomputeThreshold,
      });
      ready = await this.load(run, load);
    } else if (loadsPrompt) {
      await this.notifyUnread(kv);
    }
    const external = ready - sequence.hitTokens;
    this.stats.externalHits += external;
    this.stats.externalTransfer += external;
    this.stats.localCacheHit += sequence.hitTokens;
    this.stats.localCompute += promptTokens - ready;

    run.phase = 'running';
    const reported = kv?.['remote_prefill_cached_tokens'];
    const cachedTokens = loadsPrompt && external > 0 && typeof reported === 'number' ? reported : ready;
    const createdTokens = Math.max(0, Math.floor(promptTokens / this.config.blockSize) * this.config.blockSize - ready);
    await this.prefill(run, Math.min(ready, promptTokens - 1));
    const sent = lmcache?.send(sequence, request);
    request.onStart?.();
    const { finish, stopReason } = await this.decode(run);

    const output = sequence.tokens.slice(promptTokens);
    if (finish !== 'abort' && kv !== undefined && !isTruthy(kv['do_remote_decode'])) await this.draft(run);
    const own = finish === 'abort' || kv === undefined ? null : this.pin(run, kv, output.length, cachedTokens);
    const handle = lmcache === undefined ? own : await lmcache.reply(request, output, sent);
    return { finish, stopReason, output, cachedTokens, createdTokens, handle };
  }

  private async load(run: Run, load: KvLoad): Promise<number> {
    const { sequence } = run;
    switch (load.kind) {
      case 'none':
        return sequence.hitTokens;
      case 'notify':
        await this.notifyDone(load.target);
        return sequence.hitTokens;
      case 'hang':
        return this.hang(run);
      case 'crash':
        this.die(load.reason, load.silent ? run.request : undefined);
        if (load.silent) return this.hang(run);
        throw new EngineError('dead');
      case 'pull':
        return this.pull(run, load);
    }
  }

  private async hang(run: Run): Promise<never> {
    run.phase = 'hung';
    this.stats.hung += 1;
    if (run.failure === undefined) {
      await new Promise<void>((resolve) => {
        run.wake = resolve;
      });
    }
    throw new EngineError(run.failure ?? 'aborted');
  }

  private async pull(run: Run, load: Extract<KvLoad, { kind: 'pull' }>): Promise<number> {
    const { sequence } = run;
    const { target, tokens, blocks } = load;
    run.phase = 'loading';
    this.stats.externalQueries += tokens;
    const reply = await this.peers.ask(target.host, target.port, {
      op: 'read',
      engineId: target.engineId,
      compat: this.compat,
      requestId: target.requestId,
      blockIds: target.blockIds.slice(target.blockIds.length - blocks),
      expiry: target.expiry,
    });
    await sleepOn(this.clock, this.config.pullMsPerBlock * blocks, run.stop.signal);
    if (reply.error !== null || reply.slots === null) {
      this.check(run);
      this.stats.loadFailures += 1;
      if (this.config.policy === 'fail') throw new EngineError('load_failure');
      return load.side === 'prefill' && sequence.hitTokens === 0 ? this.hang(run) : sequence.hitTokens;
    }
    await this.notifyDone(target);
    this.check(run);
    const wrong = sequence.store(reply.slots, sequence.hitTokens, blocks * this.config.blockSize, tokens);
    this.stats.pulls += 1;
    if (reply.isLate === true) this.stats.latePulls += 1;
    this.stats.pulledTokens += tokens;
    this.stats.mismatchedTokens += wrong;
    if (wrong > 0) this.stats.mismatchedPulls += 1;
    return sequence.hitTokens + tokens;
  }

  private async notifyDone(target: PullTarget): Promise<void> {
    await this.peers.ask(target.host, target.port, {
      op: 'done',
      engineId: target.engineId,
      requestId: target.requestId,
    });
  }

  private async prefill(run: Run, ready: number): Promise<void> {
    const { sequence, request } = run;
    const { fixedMs, prefillMsPerToken } = this.config;
    const compute = sequence.tokens.length - ready;
    await sleepOn(this.clock, fixedMs + request.slowMs + prefillMsPerToken * compute, run.stop.signal);
    this.check(run);
    sequence.readBack(ready);
    while (sequence.computed < sequence.tokens.length) sequence.computeNext();
  }

  private async decode(run: Run): Promise<{ finish: EngineResult['finish']; stopReason: number | null }> {
    const { sequence, request } = run;
    // A prompt that ends in the middle of a thought is gone on with: the reply comes behind it.
    const thinks = request.prompt.at(-1) === special.think;
    const thought = thinks ? sampleThought(sequence.state, request.sampler.salt) : -1;
    let forced: readonly ForcedToken[] | undefined = request.force?.(sequence.state);
    for (let count = 1; ; count += 1) {
      const pause = this.config.decodeMsPerToken + (count > 1 ? request.slowMs : 0);
      if (pause > 0) await sleepOn(this.clock, pause, run.stop.signal);
      else if (count % yieldEvery === 0) await new Promise((resolve) => setImmediate(resolve));
      this.check(run);
      const maskEos = request.ignoreEos || count <= request.minTokens || count <= thought;
      let id = sampleToken(sequence.state, request.sampler, maskEos);
      if (count === thought + 1) {
        id = special.thinkEnd;
      } else if (forced !== undefined && count > thought) {
        const next = forced[count - 2 - thought];
        id = next === 'letter' ? sampleLetter(sequence.state, request.sampler.salt) : (next ?? special.eos);
        if (next === undefined) forced = undefined;
      }
      sequence.tokens.push(id);
      this.stats.generationTokens += 1;
      const endsAtEos = id === special.eos && !request.ignoreEos;
      const endsAtStop = request.stopTokenIds.has(id) && count > request.minTokens;
      const isFull = count >= request.maxTokens || sequence.tokens.length >= this.config.maxModelLen;
      const isLast = endsAtEos || endsAtStop || isFull;
      const goesOn = request.onToken({ id, state: sequence.state, isLast });
      this.check(run);
      // A stop string in the last token finds a request that the core has ended by itself: nothing is aborted.
      if (!goesOn && !isLast) return { finish: 'abort', stopReason: null };
      if (endsAtEos || endsAtStop) {
        // The step after the EOS has begun already, but for a request that could not go on in any case.
        if (this.config.asyncScheduling && !isFull && (await this.grow(run))) sequence.computeNext();
        return { finish: 'stop', stopReason: endsAtEos ? null : id };
      }
      if (isFull) return { finish: 'length', stopReason: null };
      if (await this.grow(run)) sequence.computeNext();
    }
  }

  /** Computes the last token and drafts behind it that nobody will see. */
  private async draft(run: Run): Promise<void> {
    const { sequence } = run;
    const { speculativeTokens, maxModelLen } = this.config;
    if (speculativeTokens === 0) return;
    const end = Math.min(sequence.tokens.length + speculativeTokens, maxModelLen);
    while (sequence.computed < end) {
      if (sequence.computed === sequence.tokens.length) sequence.tokens.push(special.user);
      if (await this.grow(run)) sequence.computeNext();
    }
  }

  /** Makes room for the newest token; false if the request lost its blocks and was computed again instead. */
  private async grow(run: Run): Promise<boolean> {
    const { sequence } = run;
    if (sequence.blocksNeeded <= sequence.blocks.length) return true;
    const more = this.pool.take([], 1);
    if (more !== undefined) {
      sequence.blocks.push(...more);
      return true;
    }
    this.stats.preemptions += 1;
    this.pool.release(sequence.blocks);
    sequence.blocks = [];
    this.queue.leave(run);
    await this.queue.admit(run, true);
    this.check(run);
    run.phase = 'running';
    await this.prefill(run, Math.min(sequence.hitTokens, sequence.tokens.length - 1));
    return false;
  }

  private pin(run: Run, kv: NonNullable<EngineRequest['kv']>, outputTokens: number, cached: number) {
    const { sequence, request } = run;
    const prepares = isTruthy(kv['do_remote_decode']);
    if (!prepares && !this.config.bidirectional) return null;
    const leaks = !prepares && !isTruthy(kv['do_remote_prefill']);
    const used = Math.ceil(sequence.computed / this.config.blockSize);
    const blocks = sequence.blocks.slice(0, used);
    this.pool.release(sequence.blocks.slice(used));
    sequence.blocks = [];
    const lifeMs = prepares ? this.config.kvLeaseMs : this.config.decoderTtlMs;
    if (leaks) this.stats.leakedPins += 1;
    this.pins.add({
      requestId: request.internalId,
      blocks,
      tokens: sequence.computed,
      kind: leaks ? 'leak' : prepares ? 'lease' : 'ttl',
      deadline: leaks ? undefined : this.clock.now() + lifeMs,
    });
    return buildHandle({
      prepares,
      blocks,
      engineId: this.engineId,
      requestId: request.internalId,
      host: this.config.advertiseHost ?? this.config.sideHost,
      port: this.sidePort,
      tokens: sequence.computed,
      expirySeconds: this.monotonicSeconds() + lifeMs / 1000,
      hasGeneration: this.config.hasGeneration,
      cachedTokens: outputTokens === 1 ? cached : undefined,
    });
  }
}
