import { contentOf, post, type Reply } from '../support/harness.ts';
import type { ChaosWorld } from './chaos-world.ts';
import type { Draw } from './property-requests.ts';
import { wait } from './reuse-world.ts';

interface Message {
  readonly role: 'user' | 'assistant';
  readonly content: string;
}

/** How one request went. */
export interface Told {
  readonly id: string;
  readonly status: number;
  /** `whole`: equal to the reference. `cut`: a beginning of it, then an error in the stream. `error`: no content at all. */
  readonly kind: 'whole' | 'cut' | 'error' | 'wrong';
  readonly text: string;
}

/** Turns of one conversation before the client begins another. */
const TURNS = 5;

/** One client: conversations of several turns, each a stream, until told to stop. */
export async function converse(
  world: ChaosWorld,
  name: string,
  draw: Draw,
  isOver: () => boolean,
  tell: (told: Told) => void,
): Promise<void> {
  await wait(draw.int(0, 3000));
  for (let conversation = 0; !isOver(); conversation += 1) {
    const about = `${name} of conversation ${conversation} `.repeat(draw.int(4, 10));
    let messages: readonly Message[] = [{ role: 'user', content: about }];
    for (let turn = 0; turn < TURNS && !isOver(); turn += 1) {
      const id = `${name}-${conversation}-${turn}`;
      const body = { model: 'sim-model', messages, max_tokens: draw.int(6, 14), ignore_eos: true };
      const answer = await ask(world, id, { ...body, stream: true, conversation_id: `${name}-${conversation}` }, body);
      tell(answer.told);
      if (answer.told.kind === 'error') break;
      messages = [
        ...messages,
        { role: 'assistant', content: answer.right },
        { role: 'user', content: `Go on, ${turn}.` },
      ];
      await wait(draw.int(0, 500));
    }
  }
}

async function ask(
  world: ChaosWorld,
  id: string,
  body: unknown,
  reference: unknown,
): Promise<{ readonly told: Told; readonly right: string }> {
  const path = '/v1/chat/completions';
  const reply = await post(`${world.url}${path}`, body, { headers: { 'x-request-id': id } }).catch(lost);
  const { status, text } = reply;
  if (status !== 200) return { told: { id, status, kind: 'error', text }, right: '' };
  const seen = contentOf(text);
  const [right = ''] = contentOf((await post(`${world.plain.url}${path}`, reference)).text).texts;
  const shown = seen.texts[0] ?? '';
  const whole = seen.errors.length === 0 && seen.done && shown === right && seen.finish[0] === 'length';
  const cut = seen.errors.length > 0 && seen.done && right.startsWith(shown);
  return { told: { id, status, kind: whole ? 'whole' : cut ? 'cut' : 'wrong', text }, right };
}

/** A connection that baton itself broke: no client may see that. */
function lost(error: unknown): Pick<Reply, 'status' | 'text'> {
  const cause = error instanceof Error ? error.cause : undefined;
  return { status: 0, text: `${String(error)}: ${String(cause)}` };
}
