import { randomUUID } from 'node:crypto';
import type { Client } from '@connectrpc/connect';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import type { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { isSameLife } from './instance-record.ts';
import type { InstanceView } from './instance-view.ts';

/** Tells the store when the blocks behind its entries are gone: their owner restarted, or left. */
export class OwnerWatch implements Disposable {
  readonly #store: Client<typeof KVCacheStore>;
  readonly #view: InstanceView;
  readonly #lives = new Map<string, Life>();
  readonly #unsubscribe: () => void;

  constructor(store: Client<typeof KVCacheStore>, view: InstanceView) {
    this.#store = store;
    this.#view = view;
    this.#unsubscribe = view.onChange(() => this.#read());
    this.#read();
  }

  [Symbol.dispose](): void {
    this.#unsubscribe();
  }

  #read(): void {
    const seen = new Set<string>();
    for (const { id, incarnation, state } of this.#view.snapshot()) {
      seen.add(id);
      const before = this.#lives.get(id);
      const gone = state === InstanceState.GONE;
      this.#lives.set(id, { incarnation, gone });
      if (gone && before?.gone !== true) this.#invalidate(id, undefined, 'gone');
      const restarted =
        before?.incarnation !== undefined && incarnation !== undefined && !isSameLife(before.incarnation, incarnation);
      if (restarted && !gone) this.#invalidate(id, incarnation, 'restarted');
    }
    for (const id of [...this.#lives.keys()]) {
      if (seen.has(id)) continue;
      const wasGone = this.#lives.get(id)?.gone === true;
      this.#lives.delete(id);
      if (!wasGone) this.#invalidate(id, undefined, 'gone');
    }
  }

  #invalidate(instanceId: string, current: Life['incarnation'], reason: string): void {
    const message = { idempotencyKey: randomUUID(), instanceId, reason, ...(current === undefined ? {} : { current }) };
    // A store that does not hear this still compares the entry's owner with the pools before a handle is used.
    this.#store.invalidateOwner(message).catch(() => undefined);
  }
}

interface Life {
  readonly incarnation: ReturnType<InstanceView['snapshot']>[number]['incarnation'];
  readonly gone: boolean;
}
