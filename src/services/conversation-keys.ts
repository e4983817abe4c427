import { create } from '@bufbuild/protobuf';
import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { type EntryKey, EntryKeySchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import type { RequestFacts } from '../../gen/baton/v1/router_pb.ts';
import { adapterRoot } from '../core/compat.ts';

/** Conversations to look under, in order. */
export function lookupIds(facts: RequestFacts): readonly string[] {
  if (facts.lookupConversationIds.length > 0) return facts.lookupConversationIds;
  return facts.conversationId === '' ? [] : [facts.conversationId];
}

/** Where handles are looked for. */
export interface HandlePlace {
  readonly conversationId: string;
  /** A handle is used with all its tokens or not at all: what has other KV under equal tokens may come behind them. */
  readonly wholeOnly: boolean;
}

/** Where handles of earlier turns are, in order. */
export function handlePlaces(facts: RequestFacts): readonly HandlePlace[] {
  if (facts.media === undefined) {
    return lookupIds(facts).map((conversationId) => ({ conversationId, wholeOnly: false }));
  }
  return facts.media.lookups
    .slice(0, MAX_MEDIA_LOOKUPS)
    .map(({ conversationId, moreMedia }) => ({ conversationId, wholeOnly: moreMedia }));
}

/** The limit of the contract. */
const MAX_MEDIA_LOOKUPS = 8;

/** The conversation that the turn's handle is kept under; empty: none. */
export function handleHome({ media, conversationId }: RequestFacts): string {
  return media?.conversationId ?? conversationId;
}

/** The history found it, if anything did, and shows no reply yet. */
export function mayBeFirst(facts: RequestFacts): boolean {
  return facts.derivedConversation && !facts.continues;
}

/** What engines serve a request with that names no model: the first of theirs, which is equal in a compat group. */
const UNNAMED_MODEL = 'baton.unnamed';

/** The model under which KV is kept and proven. */
export function keyModel(model: string): string {
  return model === '' ? UNNAMED_MODEL : model;
}

/** The key of a conversation in the store; `adapter` is {@link adapterOf} these facts. */
export function entryKeyOf(facts: RequestFacts, adapter: string, conversationId: string): EntryKey {
  const { tenant, model, cacheSalt } = facts;
  return create(EntryKeySchema, { tenant, model: keyModel(model), adapter, cacheSalt, conversationId });
}

/** Root of the adapter that the model is; empty for a base model. */
export function adapterOf(instances: readonly Instance[], { model }: RequestFacts): string {
  for (const instance of instances) {
    const root = adapterRoot(instance, model);
    if (root !== '') return root;
  }
  return '';
}
