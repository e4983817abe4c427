import type { Draw } from './property-requests.ts';

/** A request of one turn, as a client sends it. */
export interface TurnAsk {
  readonly path: '/v1/chat/completions' | '/v1/completions';
  /** Without the conversation id. */
  readonly body: Readonly<Record<string, unknown>>;
  readonly headers: Readonly<Record<string, string>>;
  /** Members that name the conversation, if the body does. */
  readonly named: Readonly<Record<string, unknown>>;
  readonly isNamed: boolean;
  readonly isLocal: boolean;
  /** A member of it could shape the prompt unseen; pictures are told apart. */
  readonly isUnproven: boolean;
  readonly hasMedia: boolean;
  readonly continues: boolean;
  readonly stream: boolean;
}

type Content = string | readonly Readonly<Record<string, unknown>>[];
interface Message {
  readonly role: 'system' | 'user' | 'assistant';
  readonly content: Content;
}

/** One line of a conversation; several may go on under one name. */
export interface Head {
  readonly api: 'chat' | 'text';
  readonly messages: readonly Message[];
  readonly text: string;
  /** Exact tokens of the text, where the client goes on by ids. */
  readonly ids: readonly number[] | undefined;
  /** Nothing was answered yet. */
  readonly isFresh: boolean;
}

/** What turns have in common, wherever they go. */
export interface Voice {
  readonly tenant: string | undefined;
  readonly model: string;
  readonly salt: string;
  readonly conversation: string;
}

const WORDS =
  'the baton passes from hand to hand while both of them run and nobody may look back or let it fall '.split(' ');
/** Longest history in characters before a conversation begins anew. */
const MOST_TEXT = 900;

function words(draw: Draw, low: number, high: number): string {
  const size = draw.int(low, high);
  const stem = draw.int(0, 7);
  let text = '';
  for (let i = 0; text.length < size; i += 1) text += `${WORDS[(i * (stem + 1) + stem) % WORDS.length]} `;
  return `${text.slice(0, size)}${draw.chance(0.5) ? draw.int(0, 99).toString(36) : ''}`;
}

/** Begins a conversation. */
export function beginHead(draw: Draw): Head {
  if (draw.chance(0.3)) return { api: 'text', messages: [], text: words(draw, 20, 400), ids: undefined, isFresh: true };
  const messages: Message[] = draw.chance(0.3) ? [{ role: 'system', content: words(draw, 10, 200) }] : [];
  messages.push({ role: 'user', content: words(draw, 5, 350) });
  return { api: 'chat', messages, text: '', ids: undefined, isFresh: true };
}

function lengthOf({ messages, text, ids }: Head): number {
  return JSON.stringify(messages).length + Math.max(text.length, ids?.length ?? 0);
}

/** Takes an answer into the history. */
export function answered(head: Head, text: string, ids: readonly number[]): Head {
  const messages = [...head.messages, { role: 'assistant' as const, content: text }];
  return { ...head, messages, text: head.text + text, ids: ids.length > 0 ? ids : undefined, isFresh: false };
}

/** How the next turn goes on from an answered one. */
export type Move = 'append' | 'append_ids' | 'regenerate' | 'edit' | 'truncate' | 'begin';

/** The history of the next turn; `before` is the head that was asked, `after` has the answer. */
export function nextHead(draw: Draw, before: Head, after: Head): { readonly head: Head; readonly move: Move } {
  if (lengthOf(after) > MOST_TEXT || draw.chance(0.06)) return { head: beginHead(draw), move: 'begin' };
  const move = draw.pick<Move>([
    'append',
    'append',
    'append',
    'append',
    'append_ids',
    'regenerate',
    'edit',
    'truncate',
  ]);
  switch (move) {
    case 'regenerate':
      return { head: before, move };
    case 'edit':
      return { head: edited(draw, after), move };
    case 'truncate':
      return { head: truncated(draw, after), move };
    default:
      return { head: appended(draw, after, move === 'append_ids'), move };
  }
}

function appended(draw: Draw, head: Head, byIds: boolean): Head {
  const more = words(draw, 1, 120);
  if (head.api === 'chat') return { ...head, messages: [...head.messages, { role: 'user', content: more }] };
  // A client that goes on by ids: no text is tokenized again.
  const ids = byIds && head.ids !== undefined ? [...head.ids, ...Array.from(more, (c) => c.charCodeAt(0))] : undefined;
  return { ...head, text: head.text + more, ids };
}

function edited(draw: Draw, head: Head): Head {
  const change = (text: string) => {
    const at = draw.int(0, Math.max(0, text.length - 1));
    return `${text.slice(0, at)}${draw.pick(['#', 'zz', ''])}${text.slice(at + 1)}`;
  };
  if (head.api === 'text') return { ...head, text: `${change(head.text)}.`, ids: undefined };
  const messages = [...head.messages];
  const at = draw.int(0, messages.length - 1);
  const message = messages[at];
  if (message !== undefined) {
    const text = typeof message.content === 'string' ? message.content : 'it was a picture';
    messages[at] = { ...message, content: change(text) };
  }
  return { ...head, messages: ending(draw, messages) };
}

function truncated(draw: Draw, head: Head): Head {
  if (head.api === 'text')
    return { ...head, text: head.text.slice(0, draw.int(1, head.text.length)) || 'x', ids: undefined };
  const messages = head.messages.slice(0, draw.int(1, head.messages.length));
  return { ...head, messages: ending(draw, messages) };
}

/** The last word is the user's, most of the time. */
function ending(draw: Draw, messages: readonly Message[]): readonly Message[] {
  if (messages.at(-1)?.role === 'user' || draw.chance(0.1)) return messages;
  return [...messages, { role: 'user', content: words(draw, 1, 60) }];
}

const TOOLS = ['weather', 'time'].map((name) => ({
  type: 'function',
  function: { name, parameters: { type: 'object', properties: { city: { type: 'string' } } } },
}));

/** A picture in the last message of the user. */
function withPicture(draw: Draw, messages: readonly Message[]): readonly Message[] {
  const last = messages.at(-1);
  if (last?.role !== 'user' || typeof last.content !== 'string') return messages;
  const url = `data:image/png;base64,${draw.pick(['AAAA', 'BBBB'])}`;
  const content = [
    { type: 'text', text: last.content },
    { type: 'image_url', image_url: { url } },
  ];
  return [...messages.slice(0, -1), { role: 'user', content }];
}

/** Draws the request of a turn, and the head that it really asks. */
export function drawTurn(draw: Draw, voice: Voice, given: Head): { readonly ask: TurnAsk; readonly head: Head } {
  const isChat = given.api === 'chat';
  const head = isChat && draw.chance(0.03) ? { ...given, messages: withPicture(draw, given.messages) } : given;
  const hasMedia = head.messages.some(({ content }) => typeof content !== 'string');
  const stream = draw.chance(0.5);
  const isLocal = draw.chance(0.04);
  const chat = {
    ...(draw.chance(0.05) ? { tools: TOOLS } : {}),
    ...(draw.chance(0.04) ? { logprobs: true, top_logprobs: 2 } : {}),
    ...(draw.chance(0.02) ? { chat_template_kwargs: { thinking: draw.chance(0.5) } } : {}),
  };
  const shaping = draw.chance(0.06)
    ? draw.pick<Readonly<Record<string, unknown>>>(
        isChat
          ? [
              { documents: [{ text: 'a document' }] },
              { response_format: { type: 'text' } },
              { tools: TOOLS, tool_choice: 'none' },
              { tools: TOOLS, tool_choice: 'required' },
              { reasoning_effort: 'low' },
              { truncate_prompt_tokens: 90 },
            ]
          : [{ echo: true }, { suffix: '' }, { truncate_prompt_tokens: 4000 }],
      )
    : {};
  const body = {
    model: voice.model,
    ...(isChat ? { messages: head.messages, ...chat } : { prompt: head.ids ?? head.text }),
    stream,
    ...(stream && draw.chance(0.5) ? { stream_options: { include_usage: true } } : {}),
    max_tokens: draw.pick([1, draw.int(2, 12), draw.int(8, 48), draw.int(8, 48)]),
    ...(draw.chance(0.3) ? { temperature: draw.pick([0, 0.7]), seed: draw.int(0, 3) } : {}),
    ...(draw.chance(0.12) ? { stop: draw.pick<unknown>(['e', ['th', 'q'], ' ']) } : {}),
    ...(draw.chance(0.05) ? { stop_token_ids: [101] } : {}),
    ...(draw.chance(0.2) ? { ignore_eos: true } : {}),
    ...(draw.chance(0.05) ? { return_token_ids: true } : {}),
    ...(voice.salt === '' ? {} : { cache_salt: voice.salt }),
    ...(isLocal ? { n: 2 } : {}),
    ...(draw.chance(0.015) ? { temperature: -1 } : {}),
    ...shaping,
  };
  const isNamed = !draw.chance(0.03);
  const how = draw.pick(['own', 'own', 'header', 'session', 'xargs']);
  const id = voice.conversation;
  const named =
    !isNamed || how === 'header'
      ? {}
      : how === 'own'
        ? { conversation_id: id }
        : how === 'session'
          ? { session_id: id }
          : { vllm_xargs: { session_id: id } };
  const ask: TurnAsk = {
    path: isChat ? '/v1/chat/completions' : '/v1/completions',
    body,
    named,
    headers: {
      ...(voice.tenant === undefined ? {} : { authorization: `Bearer ${voice.tenant}` }),
      ...(isNamed && how === 'header' ? { 'x-session-id': id } : {}),
    },
    isNamed,
    isLocal,
    isUnproven: Object.keys(shaping).length > 0,
    hasMedia,
    continues: isChat && head.messages.some(({ role }) => role === 'assistant'),
    stream,
  };
  return { ask, head };
}
