import { hashText } from './hash.ts';
import { isObject, type JsonObject } from './json.ts';
import { encodeInto, special, type TokenizerKind } from './tokenizer.ts';

const mediaTokens = 8;

/** What shapes the prompt of a chat request besides its messages. */
export interface TemplateInput {
  readonly messages: readonly unknown[];
  readonly tools?: unknown;
  readonly chatTemplate?: unknown;
  readonly templateKwargs?: unknown;
  readonly documents?: unknown;
  readonly reasoningEffort?: unknown;
  readonly addGenerationPrompt: boolean;
  readonly continueFinalMessage: boolean;
  readonly addSpecialTokens: boolean;
}

/** Rendered prompt; `hasMedia` tells that a part was not text, `mediaKey` partitions KV by the media's bytes. */
export interface RenderedChat {
  readonly tokens: number[];
  readonly hasMedia: boolean;
  readonly mediaKey: string;
}

function roleToken(role: unknown): number {
  if (role === 'system' || role === 'developer') return special.system;
  if (role === 'assistant') return special.assistant;
  if (role === 'tool' || role === 'function') return special.tool;
  return special.user;
}

/** Arguments arrive as JSON text and a template prints them as JSON again, so their white space is not kept. */
function normalizeArguments(value: unknown): string {
  if (typeof value !== 'string') return JSON.stringify(value ?? {});
  try {
    return JSON.stringify(JSON.parse(value));
  } catch {
    return value;
  }
}

function renderCall(call: unknown): string {
  const fn = isObject(call) && isObject(call['function']) ? call['function'] : {};
  return `{"name":${JSON.stringify(fn['name'] ?? null)},"arguments":${normalizeArguments(fn['arguments'])}}`;
}

/** Renders messages to token ids; the same input always gives the same ids. */
export function renderChat(input: TemplateInput, kind: TokenizerKind): RenderedChat {
  const tokens: number[] = input.addSpecialTokens ? [special.bos] : [];
  let hasMedia = false;
  let mediaKey = '';
  const put = (token: number, value: unknown): void => {
    tokens.push(token);
    encodeInto(tokens, typeof value === 'string' ? value : JSON.stringify(value), kind);
    tokens.push(special.end);
  };
  const putContent = (content: unknown): void => {
    if (typeof content === 'string') {
      encodeInto(tokens, content, kind);
      return;
    }
    if (!Array.isArray(content)) return;
    const parts: readonly unknown[] = content;
    for (const part of parts) {
      const fields: JsonObject = isObject(part) ? part : { text: part };
      const text = fields['text'] ?? fields['refusal'];
      if (typeof text === 'string') {
        encodeInto(tokens, text, kind);
      } else {
        hasMedia = true;
        const digest = hashText(JSON.stringify(part));
        mediaKey += `${digest.a}.${digest.b};`;
        for (let i = 0; i < mediaTokens; i += 1) tokens.push(special.media);
      }
    }
  };

  if (input.chatTemplate !== undefined && input.chatTemplate !== null) put(special.system, input.chatTemplate);
  if (isObject(input.templateKwargs) && Object.keys(input.templateKwargs).length > 0) {
    put(special.system, input.templateKwargs);
  }
  if (Array.isArray(input.tools) && input.tools.length > 0) put(special.tools, input.tools);
  if (Array.isArray(input.documents) && input.documents.length > 0) put(special.documents, input.documents);
  if (typeof input.reasoningEffort === 'string') put(special.effort, input.reasoningEffort);

  input.messages.forEach((message, index) => {
    const fields: JsonObject = isObject(message) ? message : {};
    tokens.push(roleToken(fields['role']));
    if (typeof fields['name'] === 'string') encodeInto(tokens, `${fields['name']}: `, kind);
    if (typeof fields['tool_call_id'] === 'string') encodeInto(tokens, `${fields['tool_call_id']}: `, kind);
    putContent(fields['content']);
    if (Array.isArray(fields['tool_calls'])) {
      const calls: readonly unknown[] = fields['tool_calls'];
      for (const call of calls) {
        tokens.push(special.call);
        encodeInto(tokens, renderCall(call), kind);
      }
    }
    if (!(input.continueFinalMessage && index === input.messages.length - 1)) tokens.push(special.end);
  });
  if (input.addGenerationPrompt && !input.continueFinalMessage) tokens.push(special.assistant);
  return { tokens, hasMedia, mediaKey };
}
