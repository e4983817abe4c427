import { createConnection, createServer, type Server, type Socket } from 'node:net';
import { isObject, type JsonObject } from './json.ts';
import { portOf } from './port-of.ts';

const replyTimeoutMs = 5000;

/**
 * What one engine asks another. `read` copies blocks whatever they hold; `done` frees a pin; `beat` extends leases; `put`
 * writes a prompt into an LMCache buffer.
 */
export type PeerRequest =
  | {
      readonly op: 'read';
      readonly engineId: string;
      readonly compat: string;
      readonly requestId: string;
      readonly blockIds: readonly number[];
      readonly expiry: number | null;
    }
  | { readonly op: 'done'; readonly engineId: string; readonly requestId: string }
  | { readonly op: 'beat'; readonly engineId: string; readonly requestIds: readonly string[] }
  | {
      readonly op: 'put';
      readonly engineId: string;
      readonly compat: string;
      readonly requestId: string;
      readonly partition: string;
      readonly slots: PeerSlots;
    };

/** Slots of the blocks read, block after block. */
export interface PeerSlots {
  readonly tokens: Int32Array;
  readonly positions: Int32Array;
  readonly cells: Uint32Array;
}

/** A peer's answer: an error word, or the slots of a read. */
export type PeerReply =
  | { readonly error: string }
  | {
      readonly error: null;
      readonly slots: PeerSlots | null;
      /** The blocks were not kept for the reader any more; no real engine says so. */
      readonly isLate?: boolean;
    };

function toBase64(array: Int32Array | Uint32Array): string {
  return Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString('base64');
}

function fromBase64(value: unknown): ArrayBuffer {
  const bytes = Buffer.from(typeof value === 'string' ? value : '', 'base64');
  const copy = new ArrayBuffer(bytes.byteLength);
  new Uint8Array(copy).set(bytes);
  return copy;
}

function encodeReply(reply: PeerReply): string {
  if (reply.error !== null) return JSON.stringify({ error: reply.error });
  if (reply.slots === null) return JSON.stringify({ error: null });
  return JSON.stringify({ error: null, isLate: reply.isLate, ...encodeSlots(reply.slots) });
}

function encodeSlots({ tokens, positions, cells }: PeerSlots): JsonObject {
  return { tokens: toBase64(tokens), positions: toBase64(positions), cells: toBase64(cells) };
}

function decodeSlots(value: JsonObject): PeerSlots {
  return {
    tokens: new Int32Array(fromBase64(value['tokens'])),
    positions: new Int32Array(fromBase64(value['positions'])),
    cells: new Uint32Array(fromBase64(value['cells'])),
  };
}

function encodeRequest(request: PeerRequest): string {
  if (request.op !== 'put') return JSON.stringify(request);
  const { slots, ...rest } = request;
  return JSON.stringify({ ...rest, ...encodeSlots(slots) });
}

function decodeReply(line: string): PeerReply {
  const value: unknown = JSON.parse(line);
  if (!isObject(value)) return { error: 'malformed reply' };
  if (typeof value['error'] === 'string') return { error: value['error'] };
  if (value['tokens'] === undefined) return { error: null, slots: null };
  return { error: null, slots: decodeSlots(value), isLate: value['isLate'] === true };
}

function decodeRequest(line: string): PeerRequest | undefined {
  const value: unknown = JSON.parse(line);
  if (!isObject(value) || typeof value['engineId'] !== 'string') return undefined;
  const text = (key: string, from: JsonObject): string => (typeof from[key] === 'string' ? from[key] : '');
  const engineId = value['engineId'];
  const requestId = text('requestId', value);
  const list = (items: unknown): readonly unknown[] => (Array.isArray(items) ? items : []);
  switch (value['op']) {
    case 'read':
      return {
        op: 'read',
        engineId,
        requestId,
        compat: text('compat', value),
        blockIds: list(value['blockIds']).map(Number),
        expiry: typeof value['expiry'] === 'number' ? value['expiry'] : null,
      };
    case 'done':
      return { op: 'done', engineId, requestId };
    case 'beat':
      return { op: 'beat', engineId, requestIds: list(value['requestIds']).map(String) };
    case 'put':
      return {
        op: 'put',
        engineId,
        requestId,
        compat: text('compat', value),
        partition: text('partition', value),
        slots: decodeSlots(value),
      };
    default:
      return undefined;
  }
}

function onLines(socket: Socket, handle: (line: string) => void): void {
  let rest = '';
  socket.setEncoding('utf8');
  socket.on('data', (chunk: string) => {
    const lines = (rest + chunk).split('\n');
    rest = lines.pop() ?? '';
    for (const line of lines) handle(line);
  });
}

/** The listener of one engine: newline-delimited JSON over TCP, answers in the order of the requests. */
export class SideChannelServer {
  private server: Server | undefined;
  private readonly sockets = new Set<Socket>();
  private readonly answer: (request: PeerRequest) => PeerReply;
  private readonly whenRunning: (act: () => void) => void;

  constructor(answer: (request: PeerRequest) => PeerReply, whenRunning: (act: () => void) => void = (act) => act()) {
    this.answer = answer;
    this.whenRunning = whenRunning;
  }

  /** Resolves with the bound port; rejects if it is in use. */
  listen(host: string, port: number): Promise<number> {
    const server = createServer((socket) => {
      this.sockets.add(socket);
      socket.setNoDelay(true);
      socket.on('close', () => this.sockets.delete(socket));
      socket.on('error', () => socket.destroy());
      onLines(socket, (line) => this.whenRunning(() => this.reply(socket, line)));
    });
    return new Promise((resolve, reject) => {
      server.once('error', reject);
      server.listen(port, host, () => {
        server.off('error', reject);
        this.server = server;
        resolve(portOf(server.address()));
      });
    });
  }

  private reply(socket: Socket, line: string): void {
    if (socket.destroyed) return;
    try {
      const request = decodeRequest(line);
      socket.write(`${encodeReply(request === undefined ? { error: 'malformed' } : this.answer(request))}\n`);
    } catch {
      socket.destroy();
    }
  }

  /** Closes the listener and every connection at once. */
  close(): Promise<void> {
    const { server } = this;
    this.server = undefined;
    for (const socket of this.sockets) socket.destroy();
    return new Promise((resolve) => {
      if (server === undefined) resolve();
      else server.close(() => resolve());
    });
  }
}

interface PeerLink {
  readonly socket: Socket;
  readonly waiting: ((reply: PeerReply) => void)[];
  used: boolean;
}

/** Connections to peers, one per address, kept open. A lost or silent peer is an error reply, never an exception. */
export class SideChannelClient {
  private readonly links = new Map<string, PeerLink>();
  private closed = false;

  /** Sends one request; a request that fails on a connection used before is tried once more on a new one. */
  async ask(host: string, port: number, request: PeerRequest): Promise<PeerReply> {
    const first = await this.askOnce(host, port, request);
    return first.stale ? (await this.askOnce(host, port, request)).reply : first.reply;
  }

  /** Drops all connections; later calls answer with an error. */
  close(): void {
    this.closed = true;
    for (const link of this.links.values()) link.socket.destroy();
    this.links.clear();
  }

  private askOnce(host: string, port: number, request: PeerRequest): Promise<{ reply: PeerReply; stale: boolean }> {
    if (this.closed) return Promise.resolve({ reply: { error: 'closed' }, stale: false });
    const link = this.link(host, port);
    const wasUsed = link.used;
    link.used = true;
    return new Promise((resolve) => {
      let timer: NodeJS.Timeout | undefined;
      link.waiting.push((reply) => {
        clearTimeout(timer);
        resolve({ reply, stale: wasUsed && reply.error === 'connection lost' });
      });
      timer = setTimeout(() => link.socket.destroy(), replyTimeoutMs).unref();
      link.socket.write(`${encodeRequest(request)}\n`);
    });
  }

  private link(host: string, port: number): PeerLink {
    const key = `${host} ${port}`;
    const known = this.links.get(key);
    if (known !== undefined && !known.socket.destroyed) return known;
    const socket = createConnection({ host, port });
    const link: PeerLink = { socket, waiting: [], used: false };
    socket.setNoDelay(true);
    socket.unref();
    socket.on('error', () => socket.destroy());
    socket.on('close', () => {
      if (this.links.get(key) === link) this.links.delete(key);
      for (const resolve of link.waiting.splice(0)) resolve({ error: 'connection lost' });
    });
    onLines(socket, (line) => link.waiting.shift()?.(decodeReply(line)));
    this.links.set(key, link);
    return link;
  }
}
