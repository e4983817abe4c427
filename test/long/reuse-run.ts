import type { Entry } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { FaultRule } from '../../src/sim/faults.ts';
import type { Draw } from './property-requests.ts';
import { type Expectation, ModelConversation, type ModelKey, provenTokens } from './reuse-model.ts';
import { readSubstance } from './reuse-reply.ts';
import {
  type Done,
  endsAtToken,
  isFull,
  keyOf,
  keyText,
  keyTextOf,
  leftBy,
  NEVER,
  NO_FAULTS,
  type Planned,
  type Scene,
  type Slot,
  send,
  type Tally,
  TOGETHER,
  tokensOf,
  unnamedOutcome,
  WITH_MEDIA,
} from './reuse-scene.ts';
import { answered, beginHead, drawTurn, type Head, nextHead, type TurnAsk, type Voice } from './reuse-turns.ts';
import { drawOf, isHarmless, modelsOf, storeTtlMs, until, type World, wait } from './reuse-world.ts';

/** It is put where its messages say, pictures and all, and looks there for earlier ones. */
function isKeptByMessages({ isNamed, isLocal, hasMedia }: TurnAsk): boolean {
  return isNamed && !isLocal && hasMedia;
}

/** Plays turns in a world and compares each with the model. */
export class Players {
  readonly #world: World;
  readonly #seed: number;
  readonly problems: string[] = [];
  readonly tally: Tally = {
    outcomes: {},
    ends: { right: 0, refused: 0, failed: 0, broken: 0, left: 0, unheard: 0 },
    exact: 0,
    unsure: 0,
    matched: 0,
    seenEntries: 0,
    media: 0,
    pairHits: 0,
  };
  readonly #conversations = new Map<string, ModelConversation>();
  readonly #slots = new Map<number, Slot[]>();
  /** Conversations of which the model does not know what they hold. */
  readonly #lost = new Set<string>();
  #names = 0;
  #next = 0;

  constructor(world: World, seed: number) {
    this.#world = world;
    this.#seed = seed;
  }

  /** Rounds of a random number of workers, so that there is quiet and there is crowd. */
  async playAll(): Promise<void> {
    const { turns, workers } = this.#world.options;
    const draw = drawOf(this.#seed ^ 0x5eed);
    while (this.#next < turns && this.problems.length < 10) {
      const crowd = draw.pick([1, draw.int(2, workers), workers, workers]);
      const end = Math.min(turns, this.#next + crowd * draw.int(6, 25));
      const work = async (worker: number) => {
        while (this.#next < end && this.problems.length < 10) {
          const number = this.#next;
          this.#next += 1;
          await this.#playTurn(number, worker);
        }
      };
      await Promise.all(Array.from({ length: crowd }, (_, worker) => work(worker)));
    }
  }

  async #playTurn(number: number, worker: number): Promise<void> {
    const draw = drawOf(this.#seed + number * 7919);
    const slots = this.#slots.get(worker) ?? [];
    this.#slots.set(worker, slots);
    const slot = this.#chooseSlot(draw, slots, worker);
    if (draw.chance(this.#world.options.faults)) await this.#world.injectFaults(draw, worker);
    const { head } = slot.after === undefined ? { head: slot.before } : nextHead(draw, slot.before, slot.after);
    const turns = [await this.#plan(draw, slot.voice, head, `t${number}`)];
    if (draw.chance(0.04)) {
      const other = slot.after === undefined ? head : nextHead(draw, slot.before, slot.after).head;
      turns.push(await this.#plan(draw, slot.voice, other, `t${number}b`));
    }
    const done = await this.#run(turns, slot.voice, worker);
    const [first] = done;
    // Whatever comes later of a turn that nobody has heard of: no other goes on with this conversation.
    if (done.some(({ line }) => line === undefined)) this.#lost.add(keyText(slot.voice));
    if (this.#lost.has(keyText(slot.voice))) {
      this.#slots.set(
        worker,
        slots.filter(({ voice }) => keyText(voice) !== keyText(slot.voice)),
      );
      return;
    }
    if (first?.right.substance === undefined || draw.chance(0.05)) return;
    const { text, promptIds, outputIds } = first.right.substance;
    slot.before = first.head;
    slot.after = answered(first.head, text, [...promptIds, ...outputIds]);
    if (draw.chance(0.07)) slots.push({ ...slot });
    // Some pause until their entry has expired, a few until just about then.
    if (draw.chance(0.05)) slot.wakeAt = performance.now() + storeTtlMs(this.#world.options) + draw.int(-100, 900);
    const awake = slots.filter(({ wakeAt }) => wakeAt === 0);
    const dropped = awake[draw.int(0, awake.length - 1)];
    if (awake.length > 6 && dropped !== undefined) slots.splice(slots.indexOf(dropped), 1);
  }

  #chooseSlot(draw: Draw, slots: Slot[], worker: number): Slot {
    const now = performance.now();
    const woken = slots.find(({ wakeAt }) => wakeAt > 0 && wakeAt <= now);
    if (woken !== undefined) {
      woken.wakeAt = 0;
      return woken;
    }
    const awake = slots.filter(({ wakeAt }) => wakeAt === 0);
    const [one, ...more] = awake;
    if (one !== undefined && awake.length >= 3 && !draw.chance(0.12)) return draw.pick([one, ...more]);
    // A few names for many conversations: what differs in tenant, model or salt must not meet.
    if (draw.chance(0.4)) this.#names += 1;
    const pick = (): Voice => ({
      tenant: draw.pick([undefined, 'key-one', 'key-two']),
      model: draw.pick([...modelsOf(worker)] as [string, string, string]),
      salt: draw.pick(['', '', 'salt']),
      conversation: `w${worker}-${this.#names}`,
    });
    let voice = pick();
    for (; this.#lost.has(keyText(voice)); voice = pick()) this.#names += 1;
    const slot: Slot = { voice, before: beginHead(draw), after: undefined, wakeAt: 0 };
    slots.push(slot);
    return slot;
  }

  /** Draws a turn and lets the plain engine answer it first. */
  async #plan(draw: Draw, voice: Voice, given: Head, id: string): Promise<Planned> {
    const { ask, head } = drawTurn(draw, voice, given);
    const leaveAfterMs = draw.chance(0.05) ? draw.int(0, 30) : undefined;
    const { plain } = this.#world.harness;
    const url = plain.url + ask.path;
    const reply = await send(url, { ...ask.body, return_token_ids: true }, {}, undefined);
    if (reply.kind !== 'reply') throw new Error('the plain engine gave no reply');
    const told = reply.status === 200 ? readSubstance(reply.text, ask.stream) : undefined;
    // An engine that is asked for ids leaves out the text that it was to echo.
    const echoes = told !== undefined && ask.body['echo'] === true && ask.body['return_token_ids'] !== true;
    const echo = echoes ? await send(url, ask.body, {}, undefined) : undefined;
    const substance =
      told !== undefined && echo?.kind === 'reply'
        ? { ...told, same: readSubstance(echo.text, ask.stream).same }
        : told;
    const prompt = substance?.promptIds ?? (await tokensOf(plain.url, ask));
    const facts = {
      isLocal: ask.isLocal,
      continues: ask.continues,
      isUnproven: ask.isUnproven,
      prompt,
    };
    return { id, ask, head, leaveAfterMs, right: { status: reply.status, substance, text: reply.text }, facts };
  }

  /** Runs one turn, or two at once, and compares. */
  async #run(turns: readonly Planned[], voice: Voice, worker: number): Promise<readonly Done[]> {
    const world = this.#world;
    const key = keyOf(voice);
    const isAnyNamed = turns.some(({ ask }) => ask.isNamed);
    const text = keyText(voice);
    const conversation = this.#conversations.get(text) ?? new ModelConversation();
    this.#conversations.set(text, conversation);
    const before = world.options.faults > 0 ? world.faultsLeft(worker) : NO_FAULTS;
    const trialBefore = await world.isOnTrial();
    const from = performance.now();
    this.#doubtOwners(conversation);
    const sent = await Promise.all(
      turns.map(({ id, ask, leaveAfterMs }) =>
        send(
          world.harness.url + ask.path,
          { ...ask.body, ...(ask.isNamed ? ask.named : {}) },
          { ...ask.headers, 'x-request-id': id, 'x-baton-debug': '1' },
          leaveAfterMs,
        ),
      ),
    );
    const lines = await Promise.all(
      turns.map(({ id }, index) => until(() => world.line(id), sent[index]?.kind === 'left' ? 500 : 5000)),
    );
    const to = performance.now();
    const hits: FaultRule[] = [];
    const after = world.options.faults > 0 ? world.faultsLeft(worker) : NO_FAULTS;
    for (const [place, { rule, left }] of before) if ((after.get(place)?.left ?? 0) < left) hits.push(rule);
    const outages = world.outagesDuring(from, to);
    const isTrial = trialBefore || (outages.length > 0 && (await world.isOnTrial()));
    const done = turns.map((turn, index): Done => {
      const reply = sent[index] ?? { kind: 'left' };
      const line = lines[index];
      const outcome = String(line?.['reuse'] ?? 'none');
      return { ...turn, sent: reply, line, outcome, matched: Number(line?.['matched_tokens'] ?? 0) };
    });
    const scene = {
      conversation,
      from,
      to,
      hits,
      outages: outages.length > 0,
      isTrial,
      worker,
      known: [...conversation.live],
    };
    const chosen: (Expectation | undefined)[] = [];
    for (const turn of done) {
      if (isKeptByMessages(turn.ask)) this.tally.media += 1;
      this.#checkReply(turn, scene);
      chosen.push(this.#checkOutcome(turn, done, scene));
    }
    if (isAnyNamed) {
      const [only] = done;
      const isPlain = done.length === 1 && hits.length === 0 && outages.length === 0 && only?.sent.kind === 'reply';
      const [choice] = chosen;
      const isExact = isPlain && choice !== undefined && !conversation.live.some(({ doubtful }) => doubtful);
      if (isExact && only !== undefined) await this.#settleExactly(only, choice, key, scene);
      else if (!done.some(({ line }) => line === undefined)) await this.#settleLoosely(done, key, scene);
    }
    return done;
  }

  /** What an engine that was away held is lost, or nobody can say. */
  #doubtOwners(conversation: ModelConversation): void {
    const now = performance.now();
    for (const { instance, isLost, from, until: end } of this.#world.outages) {
      for (const entry of [...conversation.live]) {
        if (entry.owner !== instance || !isLost) continue;
        const mayExpireFirst = entry.endsFrom <= end;
        if (entry.seenAt < from && end < now) {
          conversation.bury(entry, mayExpireFirst ? ['miss_owner_gone', 'miss_expired'] : ['miss_owner_gone']);
        } else if (entry.seenAt < end + 50) entry.doubtful = true;
      }
    }
  }

  #tell(turn: Done, scene: Scene, what: string, more?: unknown): void {
    const { hits, outages, isTrial } = scene;
    const show = (_: string, value: unknown) =>
      Array.isArray(value) && value.length > 20 ? `${value.length} items` : value;
    const wrongPulls = this.#world.engines.map((sim) => sim.state().mismatchedPulls);
    const state = scene.known.map(({ id, stored, tokens, owner }) => ({ id, stored, tokens: tokens.length, owner }));
    this.problems.push(
      `${this.#world.options.name} ${turn.id}: ${what}; ${JSON.stringify({ more, line: turn.line, hits, outages, isTrial, state, wrongPulls }, show).slice(0, 2000)}; ` +
        `${JSON.stringify(turn.ask).slice(0, 500)}`,
    );
  }

  /** Whatever goes wrong: a 200 without an error event is the plain engine's answer. */
  #checkReply(turn: Done, scene: Scene): void {
    const { ends } = this.tally;
    const { sent, right, ask } = turn;
    if (sent.kind === 'left') {
      ends[turn.line === undefined ? 'unheard' : 'left'] += 1;
      return;
    }
    const excused = scene.outages || scene.hits.some((rule) => !isHarmless(rule, ask.isLocal));
    const { status, text } = sent;
    if (status !== 200) {
      const isSame = status === right.status;
      ends[isSame ? 'refused' : 'failed'] += 1;
      if (!isSame && !excused) this.#tell(turn, scene, `status ${status} instead of ${right.status}`, text);
      return;
    }
    const got = readSubstance(text, ask.stream);
    if (/"(remote_block_ids|remote_engine_id)"/.test(text)) this.#tell(turn, scene, 'the client sees a handle', text);
    if (ask.body['return_token_ids'] !== true && (got.promptIds.length > 0 || got.outputIds.length > 0)) {
      this.#tell(turn, scene, 'the client sees token ids');
    }
    if (got.errors.length > 0) {
      ends.broken += 1;
      if (!excused) this.#tell(turn, scene, 'an error in the stream without a cause', text);
      return;
    }
    ends.right += 1;
    const want = right.substance;
    const cutShort = scene.hits.some(({ kind }) => kind === 'end_stream') && got.same.usage === undefined;
    const same = want === undefined ? undefined : cutShort ? { ...want.same, usage: undefined } : want.same;
    if (JSON.stringify(got.same) !== JSON.stringify(same)) this.#tell(turn, scene, 'a wrong answer', { got, want });
    if (ask.body['return_token_ids'] === true && !cutShort && !ask.isLocal) {
      const ids = JSON.stringify([got.promptIds, got.outputIds]);
      if (ids !== JSON.stringify([want?.promptIds, want?.outputIds])) this.#tell(turn, scene, 'other token ids', got);
    }
  }

  /** Compares with the model; gives what it expected, where only that could be. */
  #checkOutcome(turn: Done, together: readonly Done[], scene: Scene): Expectation | undefined {
    const { tally } = this;
    const { ask, facts, outcome, matched, sent, line } = turn;
    if (line === undefined) return undefined;
    tally.outcomes[outcome] = (tally.outcomes[outcome] ?? 0) + 1;
    const isHit = outcome === 'hit' || outcome === 'hit_cut';
    if (isHit) tally.matched += matched;
    if (isHit && together.length > 1) tally.pairHits += 1;
    if (sent.kind === 'reply' && sent.status === 200) {
      const plan = sent.headers.get('x-baton-plan') ?? '';
      if (!plan.includes(`outcome=${outcome};`) || !plan.includes(`matched=${matched}`)) {
        this.#tell(turn, scene, 'header and log differ', plan);
      }
    }
    const { conversation, from, to, hits, outages, isTrial } = scene;
    const only = (one: string) => ({ outcome: one, matched: 0, takes: undefined, rules: [] });
    const byMessages = isKeptByMessages(ask);
    const expected = byMessages
      ? [...WITH_MEDIA].map(only)
      : ask.isNamed
        ? conversation.expect(facts, from, to)
        : [only(unnamedOutcome(facts))];
    const allowed = new Set(expected.map((one) => one.outcome));
    const mayHit = allowed.has('hit') || allowed.has('hit_cut');
    const touches = (leg: string) => hits.some((rule) => rule.leg === leg);
    // A leg that reads fails where the prefill engine does, or cannot reach the decode engine.
    if (touches('prefill') && mayHit) allowed.add('warm_failed_cold_retry');
    if (touches('plain')) allowed.add('miss_unverifiable');
    if (isTrial && conversation.live.length > 0) allowed.add('miss_disabled');
    if (sent.kind === 'left') allowed.add('none');
    if (together.length > 1 && ask.isNamed) {
      for (const one of TOGETHER) allowed.add(one);
      // A fault in the other turn may be why that one left nothing that can be proven.
      if (hits.length > 0) allowed.add('miss_unverifiable');
      // Once the other turn has taken what there was, it counts what the last one left.
      for (const left of conversation.lastLeft) if (left !== undefined) allowed.add(left);
    }
    const anything = outages && !NEVER.has(outcome);
    if (!allowed.has(outcome) && !anything) {
      this.#tell(turn, scene, `outcome ${outcome} instead of ${[...allowed].join(' or ')}`, conversation);
      return undefined;
    }
    if (byMessages) {
      tally.unsure += 1;
      return { ...only(outcome), matched };
    }
    const isSure = allowed.size === 1 && !outages && together.length === 1;
    tally[isSure ? 'exact' : 'unsure'] += 1;
    // At the end of an entry's time it may be unknown which one the turn has met.
    const met = expected.filter((one) => one.outcome === outcome && one.matched === (isHit ? matched : 0));
    const changes = new Set(met.map(({ takes, rules }) => JSON.stringify([takes?.id, rules.map(({ id }) => id)])));
    const choice = changes.size === 1 ? met[0] : undefined;
    if (!isHit) return choice;
    const could = [
      ...expected.map((one) => one.matched),
      ...(outages || together.length > 1 ? scene.known.map((entry) => provenTokens(entry, facts.prompt)) : []),
      ...(together.length > 1 ? together.map((other) => provenTokens(this.#left(other), facts.prompt)) : []),
    ];
    if (!could.includes(matched)) this.#tell(turn, scene, `${matched} tokens were read`, could);
    return choice;
  }

  #left(turn: Planned): ReturnType<typeof leftBy> {
    return leftBy(turn, this.#world.options.engine);
  }

  #streamsHandles(): boolean {
    return !(this.#world.options.engine.version ?? '').startsWith('0.32');
  }

  /** The state after a turn in which nothing went wrong. */
  async #settleExactly(turn: Done, choice: Expectation, key: ModelKey, scene: Scene): Promise<void> {
    const { conversation } = scene;
    const { ask, right, sent } = turn;
    const isAnswered = sent.kind === 'reply' && sent.status === 200;
    // A request that the engine refuses never gets to the blocks.
    if (choice.takes !== undefined && isAnswered) conversation.bury(choice.takes, ['miss_taken']);
    for (const entry of choice.rules) conversation.bury(entry, ['miss_released']);
    const handedOver = isAnswered && !ask.isLocal && ask.isNamed;
    // A stop string is found by the front end, which aborts what would go on.
    const isAborted =
      right.substance?.endedByText === true && !isFull(turn, this.#world.options.engine) && !endsAtToken(turn);
    const gives = handedOver && !isAborted && (!ask.stream || this.#streamsHandles());
    // The tokens of an echoed prompt are not told: what they left is given back.
    const proves = gives && ask.body['echo'] !== true;
    // What pictures show is not in the tokens: the turn is kept under its messages.
    const leaves = proves && !ask.hasMedia;
    const leavesMedia = proves && ask.hasMedia && !ask.isUnproven;
    const wanted = conversation.live.length + (leaves ? 1 : 0);
    const entries = await until(async () => {
      const found = await this.#world.entriesOf(key);
      const isSettled = found.length === Math.min(8, wanted) && found.every(({ claimed }) => !claimed);
      return isSettled ? found : undefined;
    }, 3000);
    const now = performance.now();
    if (entries === undefined) {
      const found = await this.#world.entriesOf(key);
      // One that expires at this moment is no mistake.
      if (conversation.live.some(({ endsFrom }) => endsFrom <= now)) return this.#settleLoosely([turn], key, scene);
      const seen = found.map(({ entryId, claimed }) => ({ entryId, claimed }));
      this.#tell(turn, scene, `${found.length} entries instead of ${wanted}`, { seen, live: conversation.live });
      return;
    }
    const fresh = entries.filter(({ entryId }) => !conversation.live.some(({ id }) => id === entryId));
    if (fresh.length !== (leaves ? 1 : 0)) this.#tell(turn, scene, `${fresh.length} new entries`, entries.length);
    for (const entry of fresh) this.#take(turn, [turn], entry, scene);
    if (handedOver) {
      conversation.remembered = 'yes';
      conversation.lastLeft = new Set([leaves ? undefined : leavesMedia ? 'media' : this.#whyNothing(ask, gives)]);
    }
  }

  #whyNothing({ stream, hasMedia }: TurnAsk, gives: boolean): string {
    if (gives) return hasMedia ? 'miss_unsupported' : 'miss_unverifiable';
    return stream && !this.#streamsHandles() ? 'miss_unsupported_stream' : 'miss_no_handle';
  }

  /** Takes a new entry of the store into the model, where it is what one of the turns must have left. */
  #take(turn: Done, turns: readonly Done[], entry: Entry, scene: Scene): void {
    const { conversation, from } = scene;
    const { entryId, storedTokens, chainTokens, owner } = entry;
    const maker = turns.find((one) => {
      const { tokens, stored } = this.#left(one);
      return tokens.length === chainTokens && stored === storedTokens;
    });
    if (maker === undefined) {
      const sizes = turns
        .map((one) => this.#left(one))
        .map(({ tokens, stored }) => ({ tokens: tokens.length, stored }));
      this.#tell(turn, scene, 'an entry of another size', { storedTokens, chainTokens, sizes });
      return;
    }
    const { tokens, stored } = this.#left(maker);
    const now = performance.now();
    const ttl = storeTtlMs(this.#world.options);
    const instance = owner?.instanceId ?? '';
    const during = this.#world.outagesDuring(from, now);
    this.tally.seenEntries += 1;
    conversation.add({
      id: entryId,
      seq: Number.parseInt(entryId.split('-').at(-1) ?? '', 36),
      tokens,
      stored,
      owner: instance,
      endsFrom: from + ttl - 5,
      endsUntil: now + ttl + 5,
      seenAt: now,
      doubtful: during.some((outage) => outage.instance === instance && outage.isLost),
    });
  }

  /** The state after faults, after two turns at once, or after a client that left: read from the store, and checked. */
  async #settleLoosely(turns: readonly Done[], key: ModelKey, scene: Scene): Promise<void> {
    const { conversation } = scene;
    const [turn] = turns;
    if (turn === undefined) return;
    const read = async () => {
      const found = await this.#world.entriesOf(key);
      return found.every(({ claimed }) => !claimed) ? found : undefined;
    };
    const entries = await until(read, 5000);
    if (entries === undefined) {
      this.#tell(turn, scene, 'a claim stays open');
      return;
    }
    const handed = turns.filter(({ ask }) => ask.isNamed && !ask.isLocal);
    const fresh = entries.filter(({ entryId }) => !conversation.live.some(({ id }) => id === entryId));
    if (fresh.length > handed.length) this.#tell(turn, scene, `${fresh.length} new entries of ${handed.length} turns`);
    for (const entry of [...conversation.live]) {
      if (entries.some(({ entryId }) => entryId === entry.id)) continue;
      conversation.bury(entry, ['miss_taken', 'miss_released', 'miss_expired', 'miss_owner_gone']);
    }
    const makers = handed.filter(({ ask }) => !ask.hasMedia);
    for (const entry of fresh.toSorted((a, b) => (a.entryId < b.entryId ? -1 : 1))) {
      this.#take(turn, makers, entry, scene);
    }
    // Entries of turns of one size cannot be told apart, and whose tokens they hold decides later matches.
    if (fresh.length > 0 && makers.length > 1) {
      const sizes = new Set(
        makers.map((one) => JSON.stringify([this.#left(one).tokens.length, this.#left(one).stored])),
      );
      const texts = new Set(makers.map((one) => JSON.stringify(this.#left(one).tokens)));
      if (sizes.size < texts.size) this.#lost.add(keyTextOf(key));
    }
    if (handed.length === 0) return;
    // Until the store was read just now: an owner may have gone after the reply.
    if (this.#world.lostSince(scene.from)) conversation.unseen.add('miss_owner_gone');
    if (turns.length > 1) for (const outcome of ['miss_taken', 'miss_released']) conversation.unseen.add(outcome);
    const possible = [undefined, 'miss_no_handle', 'miss_unsupported_stream', 'miss_unverifiable', 'miss_unsupported'];
    const media = makers.length < handed.length ? ['media'] : [];
    conversation.lastLeft = new Set([...conversation.lastLeft, ...possible, ...media]);
    if (conversation.remembered === 'no') conversation.remembered = 'maybe';
    const isWhole = turns.every(
      ({ sent, right }) => sent.kind === 'reply' && sent.status === 200 && right.status === 200,
    );
    if (isWhole && scene.hits.length === 0 && !scene.outages) conversation.remembered = 'yes';
    await wait(0);
  }
}
