import { type Api, CONSUMED_MEMBERS, REFUSED_MEMBERS } from '../core/facts.ts';
import { checkHandle } from '../core/handle-check.ts';
import { withPromptTokenIds } from '../core/handle-edit.ts';
import type { Edits } from '../core/json-scan.ts';
import { decodeKvTransferParams, encodeKvTransferParams } from '../core/kv-transfer.ts';
import { replaceLoopbackHost } from '../core/remote-host.ts';
import { tokenIdsJson } from '../core/token-ids.ts';
import type {
  DecodeContext,
  HandleConnector,
  PrefillContext,
  PrefillReading,
  PrefillReplyContext,
  WarmHandle,
} from './connector.ts';

/**
 * vLLM's NixlConnector (pull): P computes and keeps its blocks for a lease, D reads them over the side channel.
 * P needs only the flag; every null coordinate the example proxy sends besides is optional (seen on 0.32 and 0.33).
 */
const PREFILL_PARAMS = new TextEncoder().encode('{"do_remote_decode":true,"do_remote_prefill":false}');

/** `min_tokens` above `max_tokens` and `stream_options` without `stream` are 400s; the rest only costs. */
const PREFILL_DROPS = ['stream_options', 'min_tokens', 'logprobs', 'top_logprobs', 'echo'];

export const nixl: HandleConnector = {
  runner: 'handles',
  name: 'nixl',
  order: 'prefill-then-decode',
  returnsHandles: true,
  clientGoneBetweenLegs: 'lease',

  prefill(context: PrefillContext): Edits {
    const { api, warm, reportTokenIds } = context;
    const compared = warm?.isRendered === true ? [] : warm?.promptTokenIds;
    const promptTokenIds = compared ?? context.promptTokenIds;
    const set = new Map<string, string | Uint8Array>([
      ['stream', 'false'],
      ['max_tokens', '1'],
      ['kv_transfer_params', prefillParams(api, warm, promptTokenIds)],
    ]);
    if (context.hasMaxCompletionTokens) set.set('max_completion_tokens', '1');
    if (promptTokenIds.length > 0 && api === 'completions') set.set('prompt', tokenIdsJson(promptTokenIds));
    // P tells which prompt it used, so that a handle for other tokens is noticed before D is asked.
    const isCompared = warm !== undefined && warm.promptTokenIds.length > 0;
    if (isCompared || reportTokenIds) set.set('return_token_ids', 'true');
    return { set, drop: new Set([...CONSUMED_MEMBERS, ...PREFILL_DROPS, 'ec_transfer_params']) };
  },

  readPrefillReply(raw: Uint8Array | undefined, context: PrefillReplyContext): PrefillReading {
    if (raw === undefined) return { kind: 'none', reason: 'absent' };
    const params = decodeKvTransferParams(raw);
    if (params === undefined) return { kind: 'none', reason: 'malformed_not_object' };
    const { prefill, decode } = context;
    if (prefill.blockSize > 0 && decode.blockSize > 0 && prefill.blockSize !== decode.blockSize) {
      return { kind: 'none', reason: 'block_size_differs' };
    }
    // A D that renders a longer prompt than P did dies (seen on 0.32).
    const templates = new Set(
      [prefill.templateFingerprint, decode.templateFingerprint].filter((known) => known !== ''),
    );
    if (templates.size > 1) return { kind: 'none', reason: 'template_differs' };
    const blockSize = prefill.blockSize || decode.blockSize;
    const check = checkHandle(params, { flag: 'do_remote_prefill', ...(blockSize > 0 ? { blockSize } : {}) });
    if (!check.ok) return { kind: 'none', reason: `malformed_${check.reason}` };
    const json = replaceLoopbackHost(raw, params, context.remoteHost, prefill.url, decode.url);
    if (json === undefined) return { kind: 'none', reason: 'loopback_host' };
    return { kind: 'handle', handle: { json, params } };
  },

  decode({ api, handle, promptTokenIds, captureTokens }: DecodeContext): Edits {
    const known = promptTokenIds.length > 0;
    const json = known && api === 'chat.completions' ? withPromptTokenIds(handle.json, promptTokenIds) : handle.json;
    const set = new Map<string, string | Uint8Array>([['kv_transfer_params', json]]);
    if (known && api === 'completions') set.set('prompt', tokenIdsJson(promptTokenIds));
    if (captureTokens) set.set('return_token_ids', 'true');
    return { set, drop: new Set([...CONSUMED_MEMBERS, ...REFUSED_MEMBERS.filter((key) => !set.has(key))]) };
  },
};

/** D's handle as it was stored, or the bare flag; for chat with the ids that P is to use instead of rendering the messages. */
function prefillParams(api: Api, warm: WarmHandle | undefined, promptTokenIds: readonly number[]): Uint8Array {
  const params = warm === undefined ? PREFILL_PARAMS : encodeKvTransferParams(warm.params);
  return api === 'chat.completions' && promptTokenIds.length > 0 ? withPromptTokenIds(params, promptTokenIds) : params;
}
