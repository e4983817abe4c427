import { create } from '@bufbuild/protobuf';
import {
  type MediaHistory,
  MediaHistorySchema,
  type RequestFacts,
  RequestFactsSchema,
} from '../../gen/baton/v1/router_pb.ts';
import type { MediaLink } from '../core/link.ts';
import { toldMembers } from '../core/prompt-members.ts';
import { isConvertible } from '../core/whole-stream.ts';
import type { GenerateRequest } from './hand-over.ts';

/** Where the handles of a request with media are, as the router is told. */
export function mediaHistory({ conversationId, lookups }: MediaLink): MediaHistory {
  return create(MediaHistorySchema, { conversationId, lookups: [...lookups] });
}

/** What the router may know of a request: no text. `streamsOnly` are models whose replies are never converted. */
export function routeFacts(request: GenerateRequest, streamsOnly: ReadonlySet<string>): RequestFacts {
  const { requestId, tenant, api, facts, body, scan, link } = request;
  return create(RequestFactsSchema, {
    requestId,
    tenant,
    api,
    model: facts.model,
    cacheSalt: facts.cacheSalt,
    priority: facts.priority,
    conversationId: link.conversationId,
    derivedConversation: link.derived,
    convertible: facts.stream && !streamsOnly.has(facts.model) && isConvertible(body, scan),
    stream: facts.stream,
    bodyBytes: body.byteLength,
    localReasons: [...facts.localReasons],
    continues: facts.continues,
    lookupConversationIds: [...link.lookups],
    unprovenMembers: toldMembers(request.unprovenMembers),
    prefix: [...(request.prefix ?? [])],
    ...(request.media === undefined ? {} : { media: mediaHistory(request.media) }),
  });
}
