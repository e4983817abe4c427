import type { Socket } from 'node:net';

/** The bytes that every HTTP/2 connection with prior knowledge begins with (RFC 9113, section 3.4). */
const HTTP2_PREFACE = Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', 'latin1');

/**
 * Reads the first bytes of a socket and tells its protocol; whoever takes the socket over at that moment gets those bytes
 * again. A socket whose first bytes decide nothing within `silentMs` is closed.
 */
export function sniffProtocol(socket: Socket, silentMs: number, onKnown: (protocol: 'http1' | 'http2') => void): void {
  const chunks: Buffer[] = [];
  const destroy = () => socket.destroy();
  const timer = setTimeout(destroy, silentMs);
  const stop = () => {
    clearTimeout(timer);
    socket.off('data', onData).off('end', destroy).off('error', destroy).off('close', stop);
  };
  const onData = (chunk: Buffer) => {
    chunks.push(chunk);
    const head = chunks.length === 1 ? chunk : Buffer.concat(chunks);
    const length = Math.min(head.length, HTTP2_PREFACE.length);
    const isHttp2 = head.compare(HTTP2_PREFACE, 0, length, 0, length) === 0;
    if (isHttp2 && length < HTTP2_PREFACE.length) return;
    stop();
    socket.pause();
    socket.unshift(head);
    onKnown(isHttp2 ? 'http2' : 'http1');
    // An HTTP/2 session reads what is buffered by itself; a flowing socket would drop it.
    if (!isHttp2) socket.resume();
  };
  socket.on('data', onData).once('end', destroy).once('error', destroy).once('close', stop);
}
