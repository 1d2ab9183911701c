package pelton

import java.util.concurrent.Executors
import kotlinx.coroutines.asCoroutineDispatcher
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.future.await
import kotlinx.coroutines.jdk9.asFlow
import kotlinx.coroutines.runInterruptible

// An example: pelton in coroutines of Kotlin.

/** A call that suspends. Cancelling the coroutine cancels the call, which interrupts its handler. */
suspend fun Client.callSuspending(request: ByteArray): ByteArray = callAsync(request).await()

/**
 * The messages until the sender closes. A slow collector slows the sender. The receiver belongs to the flow, which
 * closes it. Without the buffer of a flow, a message that is not collected stays in the channel.
 */
fun Receiver.asFlow(): Flow<ByteArray> = publisher().asFlow().buffer(0)

private val virtualThreads = Executors.newVirtualThreadPerTaskExecutor().asCoroutineDispatcher()

/** Suspends while there is no space. Cancelling the coroutine ends the wait: nothing was sent. */
suspend fun Sender.sendSuspending(message: ByteArray) = runInterruptible(virtualThreads) { send(message) }
