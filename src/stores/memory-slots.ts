import { CHAIN_BLOCK_TOKENS, CHAIN_DIGEST_BYTES, type PackedChain } from '../core/chain.ts';
import { CellPool, NO_CELL } from './cell-pool.ts';
import { Heap, type HeapNode } from './heap.ts';
import { Sequence } from './sequence.ts';
import { SharedValues } from './shared-values.ts';
import type { EntryView, NewEntry, StoreFilter, StoreKey, StoreOwner } from './store.ts';

/** Idle and claimed entries are live; queued ones wait to be freed; releasing ones are claimed for that. */
export type SlotState = 'idle' | 'claimed' | 'queued' | 'releasing' | 'dead';

/** The exclusive right to use the handle of one slot. */
export interface Claim {
  readonly id: string;
  readonly tenant: string;
  readonly entryId: string;
  readonly forRelease: boolean;
  readonly deadline: number;
  /** `dropped`: its entry was lost with its owner; nothing is left to commit or put back. */
  state: 'open' | 'committed' | 'released' | 'dropped';
  /** Absent once the entry is gone. */
  slot: Slot | undefined;
  node: HeapNode<Claim> | undefined;
}

type About = Omit<NewEntry, 'handle' | 'chain' | 'ttlMs'>;

/** A stored entry with its place in every index. */
export interface Slot {
  readonly id: string;
  /** Order of the puts. */
  readonly seq: number;
  readonly keyId: string;
  readonly about: About;
  /** Where the handle lies and behind it the chain, which is dropped with the live state. */
  cells: number;
  readonly handleBytes: number;
  readonly chainTokens: number;
  readonly hasChain: boolean;
  readonly bytes: number;
  readonly storedAt: number;
  readonly expiresAt: number;
  revision: bigint;
  state: SlotState;
  claim: Claim | undefined;
  expiryNode: HeapNode<Slot> | undefined;
  ownerNode: HeapNode<Slot> | undefined;
}

interface Owner {
  readonly members: Set<Slot>;
  /** By age. */
  readonly idle: Heap<Slot>;
  readonly queued: Heap<Slot>;
  entries: number;
  pinnedBlocks: number;
}

interface TenantTally {
  entries: number;
  bytes: number;
}

const NO_ENTRIES: Readonly<TenantTally> = { entries: 0, bytes: 0 };

/** What an entry was, to be told later, when its durations are other ones. */
export interface Snapshot {
  readonly slot: Pick<Slot, 'about' | 'id' | 'chainTokens' | 'hasChain' | 'storedAt' | 'expiresAt'>;
  readonly claimed: boolean;
  readonly revision: bigint;
}

/** Bytes of maps, heaps, objects and the answer kept for a replay, for one entry: measured by `npm run bench:memory`. */
const OVERHEAD_BYTES = 2048;

/** One string per key, equal only for equal keys: each part is led by its length. */
export function keyIdOf(key: StoreKey): string {
  return joinUnambiguously([key.tenant, key.model, key.adapter, key.cacheSalt, key.conversationId]);
}

/** Joins strings so that no two lists give the same text. */
export function joinUnambiguously(parts: readonly string[]): string {
  return parts.map((part) => `${part.length}:${part}`).join('');
}

/** Bytes that an entry is counted with. */
export function sizeOf(entry: NewEntry): number {
  const { key, owner } = entry;
  const texts = [key.tenant, key.model, key.adapter, key.cacheSalt, key.conversationId, entry.connector];
  texts.push(owner.instanceId, owner.engineId, owner.compatGroup, owner.life.engineId);
  const chain = entry.chain === undefined ? 0 : entry.chain.words.byteLength + entry.chain.tail.byteLength;
  return OVERHEAD_BYTES + entry.handle.byteLength + chain + 2 * texts.reduce((sum, text) => sum + text.length, 0);
}

/** Whether an entry is one of those the filter chooses. */
export function passesFilter({ key, owner }: Pick<NewEntry, 'key' | 'owner'>, filter: StoreFilter): boolean {
  if (filter.tenant !== undefined && key.tenant !== filter.tenant) return false;
  if (filter.instanceId !== undefined && owner.instanceId !== filter.instanceId) return false;
  return filter.conversationId === undefined || key.conversationId === filter.conversationId;
}

export function isLive(state: SlotState): boolean {
  return state === 'idle' || state === 'claimed';
}

export function snapshotOf(slot: Slot): Snapshot {
  return { slot, claimed: slot.claim !== undefined, revision: slot.revision };
}

export function viewAt({ slot, claimed, revision }: Snapshot, now: number): EntryView {
  const { about, id, chainTokens, hasChain, storedAt, expiresAt } = slot;
  const times = { remainingMs: Math.max(0, expiresAt - now), ageMs: Math.max(0, now - storedAt) };
  return { ...about, entryId: id, chainTokens, hasChain, claimed, revision, ...times };
}

/** All slots that are not dead, under every order in which they are looked for. Knows no clock and makes no decision. */
export class SlotTable {
  readonly #slots = new Map<string, Slot>();
  readonly #keys = new Map<string, Slot[]>();
  readonly #owners = new Map<string, Owner>();
  readonly #sequence = new Sequence<Slot>();
  readonly #pool = new CellPool();
  readonly #texts = new SharedValues<string>();
  readonly #ownersOfEntries = new SharedValues<StoreOwner>();
  /** By expiry. */
  readonly #idle = new Heap<Slot>();
  readonly #queued = new Heap<Slot>();
  readonly #busy = new Heap<Slot>();
  #entries = 0;
  #bytes = 0;
  readonly #tenants = new Map<string, TenantTally>();
  #claimedBytes = 0;
  #queuedBytes = 0;

  /** Live entries. */
  get entries(): number {
    return this.#entries;
  }

  /** Bytes of live entries. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Bytes of entries with an open claim, which cannot make room. */
  get claimedBytes(): number {
    return this.#claimedBytes;
  }

  /** Live entries of a tenant, and their bytes. */
  tenant(tenant: string): Readonly<TenantTally> {
    return this.#tenants.get(tenant) ?? NO_ENTRIES;
  }

  get queued(): number {
    return this.#queued.size;
  }

  get queuedBytes(): number {
    return this.#queuedBytes;
  }

  get owners(): ReadonlyMap<string, Pick<Owner, 'entries' | 'pinnedBlocks'>> {
    return this.#owners;
  }

  slot(entryId: string): Slot | undefined {
    return this.#slots.get(entryId);
  }

  /** Live slots of a key, oldest first; changes with every move. */
  ofKey(keyId: string): readonly Slot[] {
    return this.#keys.get(keyId) ?? [];
  }

  /** All slots, or those of one instance. */
  members(instanceId: string | undefined): Iterable<Slot> {
    return instanceId === undefined ? this.#slots.values() : (this.#owners.get(instanceId)?.members ?? []);
  }

  /** Live slots behind that number, in order. */
  after(seq: number): Iterable<Slot> {
    return this.#sequence.after(seq);
  }

  oldest(instanceId: string, state: 'idle' | 'queued'): Slot | undefined {
    return this.#owners.get(instanceId)?.[state].peek()?.item;
  }

  queuedOf(instanceId: string): number {
    return this.#owners.get(instanceId)?.queued.size ?? 0;
  }

  nextToExpire(state: 'idle' | 'queued'): Slot | undefined {
    return (state === 'idle' ? this.#idle : this.#queued).peek()?.item;
  }

  /** Some slot whose time is over. */
  due(now: number): Slot | undefined {
    for (const heap of [this.#idle, this.#queued, this.#busy]) {
      const node = heap.peek();
      if (node !== undefined && node.priority <= now) return node.item;
    }
    return undefined;
  }

  /** Keeps a copy of an entry's bytes, for {@link add}. */
  keep({ handle, chain }: Pick<NewEntry, 'handle' | 'chain'>): number {
    return this.#pool.write(chain === undefined ? [handle] : [handle, bytesOf(chain.words), bytesOf(chain.tail)]);
  }

  /** The entry's description, with what other entries also say shared with these. */
  share(about: About): About {
    const { key, owner, connector, storedTokens, engineBlockSize, blocks } = about;
    const text = (value: string): string => this.#texts.of(value, value);
    return {
      key: {
        tenant: text(key.tenant),
        model: text(key.model),
        adapter: text(key.adapter),
        cacheSalt: key.cacheSalt,
        conversationId: key.conversationId,
      },
      owner: this.#ownersOfEntries.of(ownerIdOf(owner), owner),
      connector: text(connector),
      storedTokens,
      engineBlockSize,
      blocks,
    };
  }

  /** A copy of the handle of a slot that is not dead. */
  handleOf(slot: Slot): Uint8Array {
    if (slot.state === 'dead') throw new Error('a dead slot has no handle');
    return this.#pool.read(slot.cells, 0, slot.handleBytes);
  }

  /** A copy of the chain of a live slot. */
  chainOf(slot: Slot): PackedChain | undefined {
    if (!slot.hasChain || !isLive(slot.state)) return undefined;
    const blocks = Math.floor(slot.chainTokens / CHAIN_BLOCK_TOKENS);
    const wordBytes = blocks * CHAIN_DIGEST_BYTES;
    const tailBytes = (slot.chainTokens % CHAIN_BLOCK_TOKENS) * Uint32Array.BYTES_PER_ELEMENT;
    const words = new Uint32Array(this.#pool.read(slot.cells, slot.handleBytes, wordBytes).buffer);
    const tail = new Uint32Array(this.#pool.read(slot.cells, slot.handleBytes + wordBytes, tailBytes).buffer);
    return { words, tail, tokenCount: slot.chainTokens };
  }

  /** Takes in a new idle slot; its `seq` is the greatest so far. */
  add(slot: Slot): void {
    this.#slots.set(slot.id, slot);
    this.#sequence.add(slot.seq, slot);
    const ofKey = this.#keys.get(slot.keyId);
    if (ofKey === undefined) this.#keys.set(slot.keyId, [slot]);
    else ofKey.push(slot);
    let owner = this.#owners.get(slot.about.owner.instanceId);
    if (owner === undefined) {
      owner = { members: new Set(), idle: new Heap(), queued: new Heap(), entries: 0, pinnedBlocks: 0 };
      this.#owners.set(slot.about.owner.instanceId, owner);
    }
    owner.members.add(slot);
    owner.pinnedBlocks += slot.about.blocks;
    this.#enter(slot, owner);
  }

  /** Brings a slot into another state, out of the indexes of the old one. Nothing comes back to life. */
  move(slot: Slot, to: SlotState): void {
    const owner = this.#owners.get(slot.about.owner.instanceId);
    if (owner === undefined) throw new Error('a slot has no owner');
    const wasLive = isLive(slot.state);
    this.#leave(slot, owner);
    slot.state = to;
    if (wasLive && !isLive(to)) {
      slot.cells = this.#pool.cut(slot.cells, slot.handleBytes);
      this.#sequence.delete(slot.seq);
      this.#dropFromKey(slot);
    }
    if (to !== 'dead') {
      this.#enter(slot, owner);
      return;
    }
    this.#pool.cut(slot.cells, 0);
    slot.cells = NO_CELL;
    this.#slots.delete(slot.id);
    owner.members.delete(slot);
    owner.pinnedBlocks -= slot.about.blocks;
    if (owner.members.size === 0) this.#owners.delete(slot.about.owner.instanceId);
  }

  #enter(slot: Slot, owner: Owner): void {
    slot.expiryNode = this.#expiryOf(slot.state).push(slot, slot.expiresAt);
    if (slot.state === 'idle' || slot.state === 'queued') slot.ownerNode = owner[slot.state].push(slot, slot.seq);
    this.#tally(slot, owner, 1);
  }

  #leave(slot: Slot, owner: Owner): void {
    if (slot.expiryNode !== undefined) this.#expiryOf(slot.state).remove(slot.expiryNode);
    if (slot.ownerNode !== undefined && (slot.state === 'idle' || slot.state === 'queued')) {
      owner[slot.state].remove(slot.ownerNode);
    }
    slot.expiryNode = undefined;
    slot.ownerNode = undefined;
    this.#tally(slot, owner, -1);
  }

  #expiryOf(state: SlotState): Heap<Slot> {
    if (state === 'idle') return this.#idle;
    return state === 'queued' ? this.#queued : this.#busy;
  }

  #tally(slot: Slot, owner: Owner, sign: 1 | -1): void {
    if (slot.state === 'queued') this.#queuedBytes += sign * slot.handleBytes;
    if (!isLive(slot.state)) return;
    this.#tallyTenant(slot, sign);
    owner.entries += sign;
    this.#entries += sign;
    this.#bytes += sign * slot.bytes;
    if (slot.state === 'claimed') this.#claimedBytes += sign * slot.bytes;
  }

  #tallyTenant(slot: Slot, sign: 1 | -1): void {
    const { tenant } = slot.about.key;
    let tally = this.#tenants.get(tenant);
    if (tally === undefined) {
      tally = { entries: 0, bytes: 0 };
      this.#tenants.set(tenant, tally);
    }
    tally.entries += sign;
    tally.bytes += sign * slot.bytes;
    if (tally.entries === 0) this.#tenants.delete(tenant);
  }

  #dropFromKey(slot: Slot): void {
    const ofKey = this.#keys.get(slot.keyId);
    if (ofKey === undefined) return;
    const at = ofKey.indexOf(slot);
    if (at >= 0) ofKey.splice(at, 1);
    if (ofKey.length === 0) this.#keys.delete(slot.keyId);
  }
}

function ownerIdOf({ instanceId, engineId, compatGroup, life }: StoreOwner): string {
  const { processStartSeconds = '', generation } = life;
  return joinUnambiguously([instanceId, engineId, compatGroup, life.engineId, `${generation} ${processStartSeconds}`]);
}

function bytesOf(words: Uint32Array): Uint8Array {
  return new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
}
