import type { TemplateKind } from '../../src/sim/chat-template.ts';
import { post, type Reply } from '../support/harness.ts';
import type { Draw } from './property-requests.ts';
import { readSpoken, type Spoken } from './soak-reply.ts';
import { ADAPTERS, type SoakWorld } from './soak-world.ts';

type Part = Readonly<Record<string, unknown>>;
interface Message {
  readonly role: 'system' | 'user' | 'assistant' | 'tool';
  readonly content: string | null | readonly Part[];
  readonly reasoning?: string;
  readonly tool_calls?: readonly unknown[];
  readonly tool_call_id?: string;
}

/** What the turns of a conversation have in common. */
interface Talk {
  readonly name: string;
  readonly isNamed: boolean;
  readonly tenant: string;
  readonly model: string;
  readonly tools: readonly unknown[] | undefined;
  /** The client sends back what the model thought. */
  readonly showsThoughts: boolean;
  /** Path of its picture where it has a linked one. */
  readonly picture: string | undefined;
  /** The client shows pictures of its own now and then. */
  readonly showsPictures: boolean;
  /** Turns that were answered: any can be gone on from. */
  readonly turns: { readonly messages: readonly Message[]; readonly answer: Message }[];
}

/** How one turn went, and what was special about it. */
export interface Turn {
  readonly kind: 'right' | 'refused' | 'failed' | 'broken' | 'wrong';
  readonly status: number;
  readonly outcome: string;
  readonly marks: readonly string[];
  readonly detail: string;
}

const WORDS =
  'the baton passes from hand to hand while both of them run and nobody may look back or let it fall '.split(' ');
const MOST_TURNS = 9;

const TOOLS = ['weather', 'time'].map((name) => ({
  type: 'function',
  function: { name, parameters: { type: 'object', properties: { input: { type: 'string' } } } },
}));

/** One client: a few conversations, one turn after another, for as long as `next` gives it turns. */
export async function talk(
  world: SoakWorld,
  name: string,
  draw: Draw,
  next: () => boolean,
  tell: (turn: Turn) => void,
): Promise<void> {
  const talks: Talk[] = [];
  for (let count = 0; next(); count += 1) {
    const known = talks.length === 0 || draw.chance(0.08) ? undefined : draw.pick(talks as [Talk, ...Talk[]]);
    const current = known ?? begin(world, draw, `${name}-${count}`);
    if (known === undefined) talks.push(current);
    if (talks.length > 3 || current.turns.length > MOST_TURNS) talks.splice(draw.int(0, talks.length - 1), 1);
    // Two at once go for the same handles; not where one's picture would change under the other.
    const both = current.picture === undefined && current.turns.length > 0 && draw.chance(0.05) && next();
    const turns = both ? [1, 2] : [1];
    await Promise.all(
      turns.map(async () => tell(await world.using(current.model, () => takeTurn(world, current, draw)))),
    );
  }
}

function begin(world: SoakWorld, draw: Draw, name: string): Talk {
  const picture = draw.chance(0.08) ? `/${name}` : undefined;
  if (picture !== undefined) world.changePicture(picture);
  return {
    name,
    isNamed: draw.chance(0.6),
    tenant: draw.pick(['key-one', 'key-two', 'key-three']),
    model: draw.chance(0.15) ? draw.pick(ADAPTERS as unknown as [string, ...string[]]) : 'sim-model',
    tools: draw.chance(0.3) ? TOOLS : undefined,
    showsThoughts: draw.chance(0.4),
    picture,
    showsPictures: draw.chance(0.15),
    turns: [],
  };
}

function say(draw: Draw, low: number, high: number): string {
  const size = draw.int(low, high);
  const stem = draw.int(0, 7);
  let text = '';
  for (let i = 0; text.length < size; i += 1) text += `${WORDS[(i * (stem + 1) + stem) % WORDS.length]} `;
  return `${text.slice(0, size)}${draw.int(0, 999).toString(36)}`;
}

/** The messages of the next turn, and by which move they came from the ones before. */
function compose(world: SoakWorld, current: Talk, draw: Draw): [readonly Message[], string] {
  const { turns, showsThoughts } = current;
  const last = turns.at(-1);
  if (last === undefined) {
    const system: Message[] = draw.chance(0.4) ? [{ role: 'system', content: say(draw, 60, 300) }] : [];
    return [[...system, { role: 'user', content: asked(world, draw, current, say(draw, 30, 400)) }], 'begin'];
  }
  const move = draw.pick(['append', 'append', 'append', 'append', 'append', 'regenerate', 'edit', 'branch']);
  if (move === 'regenerate') return [last.messages, move];
  const from = move === 'branch' ? draw.pick(turns as [(typeof turns)[number]]) : last;
  const { reasoning, ...bare } = from.answer;
  const answer = showsThoughts ? from.answer : bare;
  const results = (from.answer.tool_calls ?? []).map((call): Message => {
    const { id } = call as { id: string };
    return { role: 'tool', tool_call_id: id, content: say(draw, 3, 60) };
  });
  // Several calls at once: the client ran the same one twice.
  const called = results.length > 0 && draw.chance(0.3);
  const calls = called ? { tool_calls: twice(from.answer.tool_calls ?? []) } : {};
  const history = [...from.messages, { ...answer, ...calls }, ...results];
  if (called) for (const one of results) history.push({ ...one, tool_call_id: `${one.tool_call_id}-2` });
  if (results.length > 0 && !draw.chance(0.2)) return [history, 'tool'];
  const content = asked(world, draw, { ...current, picture: undefined }, say(draw, 4, 120));
  const more: readonly Message[] = [...history, { role: 'user', content }];
  return [move === 'edit' ? edited(draw, more) : more, move];
}

function twice(calls: readonly unknown[]): readonly unknown[] {
  return calls.flatMap((call) => [call, { ...(call as Part), id: `${(call as { id: string }).id}-2` }]);
}

function asked(
  world: SoakWorld,
  draw: Draw,
  { picture, showsPictures }: Pick<Talk, 'picture' | 'showsPictures'>,
  text: string,
): Message['content'] {
  const url =
    picture !== undefined
      ? `${world.picturesUrl}${picture}`
      : showsPictures && draw.chance(0.5)
        ? `data:image/png;base64,${draw.pick(['AAAA', 'BBBB', 'CCCC'])}`
        : undefined;
  if (url === undefined) return text;
  return [
    { type: 'text', text },
    { type: 'image_url', image_url: { url } },
  ];
}

/** Another word somewhere in the history, an inline picture that is exchanged, or a message less. */
function edited(draw: Draw, messages: readonly Message[]): readonly Message[] {
  const at = draw.int(0, messages.length - 2);
  const message = messages[at];
  if (message === undefined || (draw.chance(0.2) && message.role === 'user')) return messages.slice(at);
  const { content } = message;
  if (typeof content === 'string') {
    const cut = draw.int(0, content.length);
    return messages.with(at, { ...message, content: `${content.slice(0, cut)}${draw.pick(['#', 'zz'])}` });
  }
  if (!Array.isArray(content)) return messages;
  const parts = content.map((part: Part) =>
    JSON.stringify(part).includes('data:')
      ? { type: 'image_url', image_url: { url: `data:image/png;base64,${draw.pick(['AAAA', 'BBBB', 'CCCC'])}` } }
      : part,
  );
  return messages.with(at, { ...message, content: parts });
}

/** Members of one turn that shape its prompt or its reply. */
function members(draw: Draw, { tools }: Talk): Readonly<Record<string, unknown>> {
  const choice = tools === undefined ? undefined : draw.pick(['required', 'none', 'auto', 'auto', 'auto']);
  return {
    ...(tools === undefined ? {} : { tools }),
    ...(choice === undefined || draw.chance(0.2) ? {} : { tool_choice: choice }),
    ...(draw.chance(0.05) ? { truncate_prompt_tokens: draw.pick([40, 150, 2000]) } : {}),
    ...(draw.chance(0.06) ? { reasoning_effort: draw.pick(['low', 'high']) } : {}),
    ...(draw.chance(0.03) ? { chat_template_kwargs: { thinking: draw.chance(0.5) } } : {}),
    ...(draw.chance(0.3) ? { temperature: draw.pick([0, 0.7]), seed: draw.int(0, 3) } : {}),
    ...(draw.chance(0.06) ? { stop: draw.pick<unknown>(['q', ['zz', 'x ']]) } : {}),
    ...(draw.chance(0.04) ? { logprobs: true, top_logprobs: 2 } : {}),
  };
}

function marksOf(talk: Talk, move: string, body: Readonly<Record<string, unknown>>): readonly string[] {
  const text = JSON.stringify(body['messages']);
  return [
    move,
    talk.isNamed ? 'named' : 'linked by history',
    ...(talk.model === 'sim-model' ? [] : ['adapter']),
    ...(talk.tools === undefined ? [] : ['tools']),
    ...(body['tool_choice'] === 'none' ? ['tool_choice none'] : []),
    ...(body['reasoning_effort'] === undefined ? [] : ['reasoning_effort']),
    ...(body['truncate_prompt_tokens'] === undefined ? [] : ['truncate_prompt_tokens']),
    ...(text.includes('data:image') ? ['inline picture'] : []),
    ...(text.split('data:image').length > 2 ? ['several pictures'] : []),
    ...(talk.picture !== undefined && text.includes(talk.picture) ? ['linked picture'] : []),
    ...(text.includes('"assistant"') ? [talk.showsThoughts ? 'thoughts sent' : 'thoughts left out'] : []),
  ];
}

async function takeTurn(world: SoakWorld, current: Talk, draw: Draw): Promise<Turn> {
  if (current.picture !== undefined && draw.chance(0.4)) world.changePicture(current.picture);
  const [messages, move] = compose(world, current, draw);
  const stream = draw.chance(0.5);
  const body = {
    model: current.model,
    messages,
    max_tokens: draw.pick([1, draw.int(2, 20), draw.int(20, 60), draw.int(20, 60)]),
    stream,
    ...(stream ? { stream_options: { include_usage: true } } : {}),
    ...members(draw, current),
  };
  const marks = marksOf(current, move, body);
  const from = performance.now();
  const before = world.templates();
  const reply = await ask(world, { ...body, ...(current.isNamed ? { conversation_id: current.name } : {}) }, current);
  const templates = new Set([...before, ...world.templates()]);
  const outcome = /outcome=(\w+)/.exec(reply.headers?.get('x-baton-plan') ?? '')?.[1] ?? 'untold';
  const { right, seen, isSame } = await compare(world, body, reply, templates);
  const excused = world.wasDisturbed(from);
  const tell = (kind: Turn['kind']): Turn => {
    const isFine = kind === 'right' || kind === 'refused' || (excused && kind !== 'wrong');
    const told = { status: reply.status, marks, outcome, templates: [...templates], seen, right, text: reply.text };
    return {
      kind,
      status: reply.status,
      outcome,
      marks,
      detail: isFine ? '' : JSON.stringify({ ...told, body }).slice(0, 4000),
    };
  };
  if (reply.status !== 200) return tell(isSame ? 'refused' : 'failed');
  if (seen !== undefined && seen.errors.length > 0) return tell('broken');
  if (!isSame || seen === undefined) return tell('wrong');
  const { thought, text, calls } = seen;
  const answer: Message = {
    role: 'assistant',
    content: text,
    ...(thought === '' ? {} : { reasoning: thought }),
    ...(calls.length === 0 ? {} : { tool_calls: calls }),
  };
  current.turns.push({ messages, answer });
  return tell('right');
}

/** The reply of baton beside those of one engine, under each template that engines had while it was made. */
async function compare(
  world: SoakWorld,
  body: Readonly<Record<string, unknown>>,
  reply: Sent,
  templates: ReadonlySet<TemplateKind>,
): Promise<{ readonly right: unknown; readonly seen: Spoken | undefined; readonly isSame: boolean }> {
  const isStream = body['stream'] === true;
  const seen = reply.status === 200 ? readSpoken(reply.text, isStream) : undefined;
  const rights: unknown[] = [];
  for (const template of templates) {
    const plain = await post(`${world.plain.get(template)?.url}/v1/chat/completions`, body);
    if (plain.status !== 200 || seen === undefined) {
      rights.push(plain.status);
      if (plain.status === reply.status) return { right: plain.status, seen, isSame: true };
      continue;
    }
    const right = readSpoken(plain.text, isStream);
    if (JSON.stringify(right.same) === JSON.stringify(seen.same)) return { right: undefined, seen, isSame: true };
    rights.push(right);
  }
  return { right: rights, seen, isSame: false };
}

interface Sent extends Pick<Reply, 'status' | 'text'> {
  readonly headers: Headers | undefined;
}

async function ask(world: SoakWorld, body: unknown, { tenant }: Talk): Promise<Sent> {
  const headers = { authorization: `Bearer ${tenant}`, 'x-baton-debug': '1' };
  try {
    return await post(`${world.url}/v1/chat/completions`, body, { headers });
  } catch (error) {
    return { status: 0, headers: undefined, text: String(error) };
  }
}
