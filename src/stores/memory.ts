import { MEMORY_BOUNDS, MemoryStore } from './memory/store.ts';
import { lockFile } from './own-file.ts';
import { loadSnapshot, saveSnapshot } from './snapshot-file.ts';
import type { StoreOptions } from './store.ts';

/**
 * Opens a store in the memory of this process. All is lost when the process ends, except where a snapshot file is named:
 * then a clean end saves what is idle, and the next start takes it up, once.
 */
export async function openMemoryStore(options: StoreOptions): Promise<MemoryStore> {
  const { snapshotFile, onNotice } = options;
  if (snapshotFile === undefined) return new MemoryStore(options);
  const lock = await lockFile(snapshotFile, 'store');
  const loaded = await loadSnapshot(snapshotFile, Date.now()).catch(async (error: unknown) => {
    await lock[Symbol.asyncDispose]();
    throw error;
  });
  const store = new MemoryStore(options, MEMORY_BOUNDS, async (entries) => {
    try {
      const count = await saveSnapshot(snapshotFile, entries, Date.now());
      onNotice?.({ level: 'info', message: 'the store was saved', fields: { entries: count } });
    } catch (error) {
      onNotice?.({ level: 'error', message: `the store could not be saved: ${String(error)}` });
    } finally {
      await lock[Symbol.asyncDispose]();
    }
  });
  if (loaded.kind === 'refused') {
    onNotice?.({ level: 'warn', message: `the saved store is lost: ${snapshotFile} ${loaded.why}` });
  } else if (loaded.kind === 'loaded') {
    const entries = await store.restore(loaded.entries, loaded.awayMs);
    onNotice?.({ level: 'info', message: 'the saved store was taken up', fields: { entries } });
  }
  return store;
}
