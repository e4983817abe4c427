import { Agent, request } from 'node:http';

/** How one request went for its client. */
export interface Answer {
  /** 0 where there was none. */
  readonly status: number;
  readonly retryAfter: string | undefined;
  readonly text: string;
  readonly tookMs: number;
}

/** What a request may have besides its body. */
interface AskOptions {
  readonly headers?: Readonly<Record<string, string>>;
  /** The client leaves: at once after it has sent its request, or with the first piece of the reply. */
  readonly leaves?: 'sent' | 'piece';
}

/** Asks over kept connections, as many as it takes, and with little work: for tests that send many requests. */
export class PlainClient implements Disposable {
  readonly #agent = new Agent({ keepAlive: true, maxSockets: Number.POSITIVE_INFINITY });

  post(url: string, body: string, { headers = {}, leaves }: AskOptions = {}): Promise<Answer> {
    const startedAt = performance.now();
    return new Promise((resolve) => {
      let status = 0;
      let retryAfter: string | undefined;
      let text = '';
      const end = () => resolve({ status, retryAfter, text, tookMs: performance.now() - startedAt });
      const call = request(url, {
        agent: this.#agent,
        method: 'POST',
        headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body), ...headers },
      });
      call.on('response', (response) => {
        status = response.statusCode ?? 0;
        retryAfter = response.headers['retry-after'];
        response.setEncoding('utf8');
        response.on('data', (piece: string) => {
          text += piece;
          if (leaves === 'piece') call.destroy();
        });
        response.on('close', end);
        response.on('error', () => undefined);
      });
      call.on('error', end);
      call.end(body, () => {
        if (leaves === 'sent') setImmediate(() => call.destroy());
      });
    });
  }

  [Symbol.dispose](): void {
    this.#agent.destroy();
  }
}
