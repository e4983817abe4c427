import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { Transform } from 'node:stream';

/** A TCP address in front of several others, as a service has it in a cluster: each connection goes to the next target. */
export interface Switchboard extends AsyncDisposable {
  /** `host:port`. */
  readonly address: string;
  /** Where new connections go, `host:port` each; open ones stay. */
  targets: readonly string[];
  /**
   * How long bytes stay here on their way, milliseconds; infinite: for as long as that is so, as in a network that is
   * parted. Bytes that wait go on when it is changed.
   */
  delayMs: number;
  /** Cuts all connections that are open. */
  readonly cut: () => void;
}

/** Listens on a free loopback port. */
export async function startSwitchboard(targets: readonly string[] = []): Promise<Switchboard> {
  const sockets = new Set<Socket>();
  const line = new Line();
  let turn = 0;
  const server = createServer((client) => {
    const target = board.targets[turn++ % Math.max(1, board.targets.length)];
    if (target === undefined) {
      client.destroy();
      return;
    }
    const [host, port] = target.split(':');
    const upstream = connect(Number(port), host);
    for (const [from, to] of [
      [client, upstream],
      [upstream, client],
    ] as const) {
      sockets.add(from);
      from.setNoDelay();
      from.on('error', () => to.destroy());
      from.on('close', () => {
        sockets.delete(from);
        to.destroy();
      });
      from.pipe(line.stretch()).pipe(to);
    }
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const cut = () => {
    for (const socket of sockets) socket.destroy();
  };
  const board: Switchboard = {
    address: `127.0.0.1:${(server.address() as AddressInfo).port}`,
    targets,
    cut,
    get delayMs() {
      return line.delayMs;
    },
    set delayMs(delayMs: number) {
      line.delayMs = delayMs;
    },
    async [Symbol.asyncDispose]() {
      const closed = once(server, 'close');
      server.close();
      cut();
      await closed;
    },
  };
  return board;
}

/** What all connections of a switchboard run through. */
class Line {
  readonly #waiting = new Set<() => void>();
  #delayMs = 0;

  get delayMs(): number {
    return this.#delayMs;
  }

  set delayMs(delayMs: number) {
    this.#delayMs = delayMs;
    for (const pass of [...this.#waiting]) pass();
  }

  /** One direction of one connection. */
  stretch(): Transform {
    return new Transform({ transform: (chunk, _, done) => this.#pass(() => done(null, chunk)) });
  }

  #pass(done: () => void): void {
    if (this.#delayMs === 0) {
      done();
      return;
    }
    const pass = () => {
      clearTimeout(timer);
      if (this.#waiting.delete(pass)) done();
    };
    const timer = this.#delayMs === Number.POSITIVE_INFINITY ? undefined : setTimeout(pass, this.#delayMs);
    this.#waiting.add(pass);
  }
}
