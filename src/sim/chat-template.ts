import { isObject, type JsonObject } from './json.ts';
import { type MediaContents, type MediaDigests, mediaContents } from './media.ts';
import { encodeInto, special, type TokenizerKind } from './tokenizer.ts';

const mediaTokens = 8;

/**
 * `plain`, or one that renders the same messages to other tokens: `preamble` begins each prompt with words of its own, and
 * `tools-last` differs for requests with tools alone, which no look at a few messages shows.
 */
export type TemplateKind = 'plain' | 'preamble' | 'tools-last';

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
  /** Default `plain`. */
  readonly template?: TemplateKind;
  /** What the model thought is left out of all turns but the running one, and the next reply begins with thinking. */
  readonly reasoning?: boolean;
  readonly media?: MediaDigests;
}

/** Rendered prompt; `media` is empty where every part was text. */
export interface RenderedChat {
  readonly tokens: number[];
  readonly media: MediaContents;
}

const NO_MEDIA: MediaDigests = new Map();

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
  const media = new Map<number, number>();
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
        for (const content of mediaContents(fields, input.media ?? NO_MEDIA, mediaTokens)) {
          media.set(tokens.length, content);
          tokens.push(special.media);
        }
      }
    }
  };

  const hasTools = Array.isArray(input.tools) && input.tools.length > 0;
  const toolsLast = input.template === 'tools-last';
  if (input.template === 'preamble') put(special.system, 'A newer template.');
  if (input.chatTemplate !== undefined && input.chatTemplate !== null) put(special.system, input.chatTemplate);
  if (isObject(input.templateKwargs) && Object.keys(input.templateKwargs).length > 0) {
    put(special.system, input.templateKwargs);
  }
  if (hasTools && !toolsLast) put(special.tools, input.tools);
  if (Array.isArray(input.documents) && input.documents.length > 0) put(special.documents, input.documents);
  if (typeof input.reasoningEffort === 'string') put(special.effort, input.reasoningEffort);

  const lastQuestion = input.messages.findLastIndex((message) => isObject(message) && message['role'] === 'user');
  input.messages.forEach((message, index) => {
    const fields: JsonObject = isObject(message) ? message : {};
    tokens.push(roleToken(fields['role']));
    if (typeof fields['name'] === 'string') encodeInto(tokens, `${fields['name']}: `, kind);
    if (typeof fields['tool_call_id'] === 'string') encodeInto(tokens, `${fields['tool_call_id']}: `, kind);
    const thought = fields['reasoning'] ?? fields['reasoning_content'];
    if (input.reasoning === true && index > lastQuestion && typeof thought === 'string' && thought !== '') {
      tokens.push(special.think);
      encodeInto(tokens, thought, kind);
      tokens.push(special.thinkEnd);
    }
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
  if (hasTools && toolsLast) put(special.tools, input.tools);
  if (input.addGenerationPrompt && !input.continueFinalMessage) {
    tokens.push(special.assistant);
    if (input.reasoning === true) tokens.push(special.think);
  }
  return { tokens, media };
}
