import type { NewEntry, StoreFilter, StoreKey } from './store.ts';

/** Bytes of indexes and of the answer kept for a replay, for one entry: measured by `npm run bench:memory`. */
const OVERHEAD_BYTES = 512;

/** One string per key, equal only for equal keys. */
export function keyIdOf(key: StoreKey): string {
  return joinUnambiguously([key.tenant, key.model, key.adapter, key.cacheSalt, key.conversationId]);
}

/** Joins strings so that no two lists give the same text: each is led by its length. */
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

/** Whether an entry is one of those the filter chooses; its key, which a backend may have to read first, is looked at last. */
export function passesFilter(entry: Pick<NewEntry, 'key' | 'owner'>, filter: StoreFilter): boolean {
  const { tenant, instanceId, conversationId } = filter;
  if (instanceId !== undefined && entry.owner.instanceId !== instanceId) return false;
  if (tenant === undefined && conversationId === undefined) return true;
  const { key } = entry;
  return (tenant ?? key.tenant) === key.tenant && (conversationId ?? key.conversationId) === key.conversationId;
}
