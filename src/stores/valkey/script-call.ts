import { Socket } from 'node:net';
import { Command } from 'iovalkey';

/** What a script is given: texts, numbers, which it gets as digits, and bytes. */
export type Argument = string | number | Uint8Array;

/** Words as the server reads them. */
export interface Words {
  readonly text: string;
  readonly count: number;
}

/** A script to run, by its digest or by its text. */
export interface Runner {
  readonly verb: 'evalsha' | 'eval';
  readonly script: string;
  readonly words: Words;
}

/**
 * A call of a script. It writes itself as one piece of memory, and what is sent in one turn of the event loop leaves in one
 * write: a write for each call costs this process more than all the rest of the call.
 */
export class ScriptCall extends Command {
  readonly #head: string;
  readonly #args: readonly Argument[];
  #timer: NodeJS.Timeout | undefined;

  /** `lead` are the first arguments, `args` those behind them. */
  constructor({ verb, script, words }: Runner, keys: readonly string[], lead: Words, args: readonly Argument[]) {
    // The client reads no more than the keys, by which it finds the node of a cluster.
    super(verb, [script, keys.length, ...keys]);
    let head = `*${words.count + 1 + keys.length + lead.count + args.length}\r\n${words.text}${wordOf(String(keys.length))}`;
    for (const key of keys) head += wordOf(key);
    this.#head = head + lead.text;
    this.#args = args;
  }

  /** The answer; an error if there is none in the client's time for a command. */
  async answer(): Promise<unknown> {
    try {
      return await this.promise;
    } finally {
      clearTimeout(this.#timer);
    }
  }

  // The client's own deletes a property when it is over, and such objects are slow in all they do.
  override setTimeout(ms: number): void {
    this.#timer ??= setTimeout(() => this.reject(new Error('Command timed out')), ms);
  }

  override toWritable(socket: object): Buffer {
    if (socket instanceof Socket) gatherWrites(socket);
    return encode(this.#head, this.#args);
  }
}

/** A script to run. */
export function runnerOf(verb: Runner['verb'], script: string): Runner {
  return { verb, script, words: wordsOf([verb, script]) };
}

/** Texts as words. */
export function wordsOf(texts: readonly string[]): Words {
  return { text: texts.map(wordOf).join(''), count: texts.length };
}

/** A word is led by its length in bytes. */
function wordOf(text: string): string {
  return `$${Buffer.byteLength(text)}\r\n${text}\r\n`;
}

function encode(head: string, args: readonly Argument[]): Buffer {
  const pieces: (string | Uint8Array)[] = [];
  let text = head;
  let length = 0;
  for (const arg of args) {
    if (typeof arg === 'object') {
      text += `$${arg.byteLength}\r\n`;
      length += Buffer.byteLength(text) + arg.byteLength;
      pieces.push(text, arg);
      text = '\r\n';
    } else text += wordOf(String(arg));
  }
  pieces.push(text);
  const bytes = Buffer.allocUnsafe(length + Buffer.byteLength(text));
  let at = 0;
  for (const piece of pieces) {
    if (typeof piece === 'string') at += bytes.write(piece, at);
    else {
      bytes.set(piece, at);
      at += piece.byteLength;
    }
  }
  return bytes;
}

function gatherWrites(socket: Socket): void {
  if (socket.writableCorked > 0) return;
  socket.cork();
  setImmediate(() => socket.uncork());
}
