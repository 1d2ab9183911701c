;;;; Channels: senders, receivers, and channels of many senders.

(in-package #:pelton)

(define-handle sender ()
  "Sends the messages of a channel: OPEN-SENDER, MAKE-CHANNEL. One thread at a time uses it.")

(define-handle taker (;; A message that was received, and not delivered because an interrupt unwound: its four words.
                      (undelivered '() :type list))
  "Receives messages: a RECEIVER or a SUBSCRIBER.")

(define-handle receiver (;; Membership events that were received and not returned.
                         (events '() :type list))
  "Receives the messages of a channel: OPEN-RECEIVER, OPEN-GATHERING-RECEIVER, MAKE-CHANNEL. One thread at a time uses
it."
  :parent taker)

(define-handle publisher ()
  "Sends each message to up to 64 subscribers: OPEN-PUBLISHER. One thread at a time uses it.")

(define-handle senders ()
  "Sends from any thread of this process at any time: OPEN-SENDERS. Each thread has a lane of its own, which is created
when it first sends and closed when it ends.")

(define-handle listener ()
  "Listens under a name.")

(define-figures sender)
(define-figures receiver)
(define-resume-and-sync sender)
(define-resume-and-sync receiver)

;;; ---- Opening

(defconstant +handshake-ns+ 5000000000 "The longest handshake with a peer that has connected, and")
(defconstant +late-handshake-ns+ 500000000 "with one that has connected just before the deadline.")

(defun accept-peer (listener timeout spins make accept)
  "Returns the handle that MAKE makes of what ACCEPT, a function of the library, accepts within TIMEOUT seconds, and
closes LISTENER. Interrupts are served until a peer has connected."
  (without-interrupts
    (unwind-protect
         (allow-with-interrupts
           (persisting ()
             (loop with deadline = (deadline-of timeout) and fd = (descriptor listener)
                   do (with-interrupts (wait-readable fd deadline))
                      (let ((made (opening (out funcall make :spins spins)
                                    (funcall accept (handle-address listener)
                                             ;; An interrupt may have ended the sleep: then it does not wait here.
                                             (cond ((not (readable-p fd)) +no-wait+)
                                                   ((eql deadline +forever+) (%deadline +handshake-ns+))
                                                   (t (min (+ deadline +late-handshake-ns+)
                                                           (%deadline +handshake-ns+))))
                                             out))))
                        (unless (and (eql made +again+) (not (past-p deadline)))
                          (return made))))))
      (close-quietly listener))))

(defmethod descriptor ((handle listener))
  (check (attempt (%listener-fd (handle-address handle)))))

(defmacro open-endpoint (kind)
  "The endpoint of KIND that the options, which are variables here, ask for."
  (flet ((in-kind (control) (name control kind)))
    `(let ((spins (eq wait :spin)))
       (if accept
           (accept-peer (check (with-options (options channel-options wait capacity message-bytes-max resident-bytes-max
                                                      memory-bytes-max uids create mode lanes traced)
                                 (opening (out %make-listener) (%listener-open name options out))))
                        timeout spins #',(in-kind "%make-~a") #',(in-kind "%listener-accept-~a"))
           (opening-in-steps (,kind name timeout ,(in-kind "%make-~a") :spins spins)
                             (options channel-options wait capacity message-bytes-max resident-bytes-max
                                      memory-bytes-max uids create mode lanes traced))))))

(defun open-sender (name &key accept timeout wait capacity message-bytes-max resident-bytes-max memory-bytes-max uids
                           create mode lanes traced)
  "Opens the sender of a channel.

NAME: \"events\" connects to the receiver that listens under this short name, \"unix:PATH\" at this socket. \"path:DIR\"
opens the channel in this directory, and continues after the last message of the sender before.
:ACCEPT T: listens under the name instead, and waits for a receiver to connect.
:TIMEOUT seconds to wait for the listener, or for the path's channel; NIL does not wait. With :ACCEPT for the peer; NIL
waits without limit.
:WAIT :BLOCK, the default, busy-polls for some microseconds, then sleeps; :SPIN never sleeps.
:CAPACITY bytes of the lane, 64 MiB. :MESSAGE-BYTES-MAX bytes of the largest message, half of the capacity.
:RESIDENT-BYTES-MAX, :MEMORY-BYTES-MAX: limits of memory in bytes. :UIDS a list of users that may be the peer, besides
this process's own. For a path, :CREATE T creates the channel if there is none, with the permissions :MODE, #o700, and
:LANES, 1, the largest number of senders.
:TRACED T: messages may have a :TRACEPARENT, their position in a distributed trace. One that has none costs nothing
more; the largest message is 40 bytes smaller. On a path the process that creates the channel decides. The receiver needs no
option, but a pelton that knows it: an earlier version is refused.

Interrupts are served while it waits. Signals TIMED-OUT with the restart WAIT-LONGER, NO-LISTENER-ERROR,
NO-CHANNEL-ERROR, ROLE-TAKEN-ERROR, REFUSED-ERROR, NAME-ERROR, OPTION-ERROR and others; their text says what to do.

    (pelton:with-sender (sender \"events\" :timeout 10)
      (pelton:send sender octets))"
  (open-endpoint sender))

(defun open-receiver (name &key accept timeout wait capacity message-bytes-max resident-bytes-max memory-bytes-max uids
                             create mode lanes traced)
  "Opens the receiver of a channel. Arguments, waiting and conditions as OPEN-SENDER. A path's receiver begins with the
oldest message that was not released; with :TIMEOUT it also waits for a sender, unless there is a message. :TRACED
applies to a path that it creates.

    (pelton:with-receiver (receiver \"events\" :accept t)
      (pelton:do-messages (octets receiver) (print octets)))"
  (open-endpoint receiver))

(defun open-gathering-receiver (name &key wait capacity message-bytes-max resident-bytes-max memory-bytes-max uids
                                       senders-max membership-events)
  "Opens a receiver of many senders: those that connect under NAME, and threads of this process through OPEN-SENDERS.
NAME may be NIL for those threads alone. Does not wait.
:SENDERS-MAX senders at a time, 1,024. :MEMBERSHIP-EVENTS T: RECEIVE-EVENT also returns which senders join and leave.
:MEMORY-BYTES-MAX is of all senders together. Others as OPEN-SENDER. Signals IN-USE-ERROR, NAME-ERROR, OPTION-ERROR."
  (check (with-options (options gather-options wait capacity message-bytes-max resident-bytes-max memory-bytes-max uids
                                senders-max membership-events)
           (opening (out %make-receiver :spins (eq wait :spin)) (%receiver-gather name options out)))))

(defun make-channel (&key wait capacity message-bytes-max resident-bytes-max traced)
  "Returns the sender and the receiver of a channel between threads of this process. Options as OPEN-SENDER. Does not
wait. Signals OPTION-ERROR, SYSTEM-ERROR."
  (check-library)
  (with-options (options channel-options wait capacity message-bytes-max resident-bytes-max traced)
    (with-words (out 2)
      (multiple-value-bind (sender receiver)
          (without-interrupts
            (let ((result (result (%threads options out (sap+ out 8)))) (spins (eq wait :spin)))
              (if (eql result +ok+)
                  (values (adopt (%make-sender :address (sap-ref-64 out 0) :spins spins))
                          (adopt (%make-receiver :address (sap-ref-64 out 8) :spins spins)))
                  result)))
        (values (check sender) receiver)))))

(defun open-senders (receiver)
  "Opens SENDERS, through which any thread of this process sends to a receiver of OPEN-GATHERING-RECEIVER. Does not
wait. Without a name, open it before receiving. Signals REFUSED-ERROR for another receiver."
  (declare (type receiver receiver))
  (check (opening (out %make-senders) (%receiver-senders (handle-address receiver) out))))

(defmacro with-channel ((sender receiver &rest options) &body body)
  "Runs BODY with the two endpoints that MAKE-CHANNEL returns, and closes them however BODY is left. Threads that use
them must have ended by then."
  (let ((given (gensym "OPTIONS")))
    `(let ((,given (list ,@options)))
       (without-interrupts
         (multiple-value-bind (,sender ,receiver) (allow-with-interrupts (apply #'make-channel ,given))
           (unwind-protect (with-local-interrupts ,@body)
             (close-quietly ,sender)
             (close-quietly ,receiver)))))))

(defmacro with-sender ((sender name &rest options) &body body)
  "Runs BODY with the sender that OPEN-SENDER returns, and closes it however BODY is left."
  `(with-handle (,sender (open-sender ,name ,@options)) ,@body))

(defmacro with-receiver ((receiver name &rest options) &body body)
  "Runs BODY with the receiver that OPEN-RECEIVER returns, and closes it however BODY is left."
  `(with-handle (,receiver (open-receiver ,name ,@options)) ,@body))

(defmacro with-gathering-receiver ((receiver name &rest options) &body body)
  "Runs BODY with the receiver that OPEN-GATHERING-RECEIVER returns, and closes it however BODY is left."
  `(with-handle (,receiver (open-gathering-receiver ,name ,@options)) ,@body))

(defmacro with-senders ((senders receiver) &body body)
  "Runs BODY with the SENDERS that OPEN-SENDERS returns, and closes them however BODY is left. Threads that use them
must have ended by then."
  `(with-handle (,senders (open-senders ,receiver)) ,@body))

;;; ---- Sending

(defun send-slowly (sender address size timeout tried)
  "As SEND, for SIZE bytes at ADDRESS; true, or NIL by DROP-MESSAGE. TRIED is the result of the first attempt."
  (declare (type handle sender) (type word address) (type (unsigned-byte 62) size))
  (let ((handle (handle-address sender)))
    (and (persisting (:handle (and (typep sender 'sender) sender) :what "send")
           (etypecase sender
             (sender (attempt-waiting (sender handle timeout deadline :spins (handle-spins sender) :size size
                                                                      :tried tried :handle sender)
                       (%sender-send handle (int-sap address) size deadline)))
             ;; A handle that only the caller refers to must not become garbage meanwhile.
             (senders (with-pinned-objects (sender)
                        (attempt-waiting (nil nil timeout deadline :tried tried)
                          (%senders-send handle (int-sap address) size deadline))))))
         t)))

(declaim (inline try-send-sap send-sap))
(defun try-send-sap (sender sap size)
  "As ATTEMPT."
  (declare (type handle sender) (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let ((handle (handle-address sender)))
    (if (typep sender 'senders)
        (attempt (%senders-send handle sap size +no-wait+))
        (briefly (%sender-send handle sap size +no-wait+)))))

(defun send-sap (sender sap size &optional timeout)
  "As SEND, for SIZE bytes at SAP, a system area pointer."
  (let ((tried (try-send-sap sender sap size)))
    (or (eql tried +ok+)
        (send-slowly sender (sap-int sap) size timeout tried))))

(defun send-traced (sender sap size timeout traceparent)
  "As SEND, for SIZE bytes at SAP, a system area pointer, with a traceparent."
  (declare (type sender sender) (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let ((handle (handle-address sender)))
    (and (persisting (:handle sender :what "send")
           (attempt-waiting (sender handle timeout deadline :spins (handle-spins sender) :size size :handle sender)
             (%sender-send-traced handle sap size traceparent deadline)))
         t)))

(declaim (inline send))
(defun send (sender octets &key (start 0) end timeout traceparent)
  "Sends the bytes of OCTETS from START to END as one message, which is copied once, into the lane. SENDER is a SENDER,
or SENDERS, which any thread may use. Waits for free space, up to TIMEOUT seconds. Returns true. Interrupts are served
while it waits, with SENDERS within 50 ms.
:TRACEPARENT is the header of W3C Trace Context with this program's span, a string, for the receiver. One that is not
valid is as none; so is any on a channel without :TRACED, and with SENDERS.
Signals TIMED-OUT, TOO-LARGE-ERROR, and a CHANNEL-ENDED after the receiver has gone; then nothing was sent. Restarts:
WAIT-LONGER; DROP-MESSAGE, which returns NIL; after PEER-DIED-ERROR RESUME-CHANNEL, which waits for a successor of the
receiver, and sends to that."
  (with-octets-at (sap size) (octets start end)
    (if (and traceparent (typep sender 'sender))
        (send-traced sender sap size timeout traceparent)
        (send-sap sender sap size timeout))))

(defun try-send (sender octets &key (start 0) end traceparent)
  "As SEND, but never waits: returns NIL if there is no free space, and has sent nothing."
  (with-octets-at (sap size) (octets start end)
    (eql (check (if (and traceparent (typep sender 'sender))
                    (attempt (%sender-send-traced (handle-address sender) sap size traceparent +no-wait+))
                    (try-send-sap sender sap size)))
         +ok+)))

(defun send-batch (sender messages &key timeout)
  "Sends a list of messages, vectors of bytes, which become visible together or not at all. Waits for free space for
all, up to TIMEOUT seconds; an interrupt is served within 50 ms. Each is copied twice, so this is for small messages.
Returns true. Conditions as SEND."
  (declare (type sender sender))
  (let* ((count (length messages)) (handle (handle-address sender)) (at 0)
         (octets (make-octets (loop for message in messages sum (length (the (vector (unsigned-byte 8)) message)))))
         ;; struct iovec: an address and a size.
         (pieces (make-array (* 2 count) :element-type 'word)))
    (with-pinned-objects (octets pieces)
      (loop for message in messages for piece from 0 by 2
            do (replace octets message :start1 at)
               (setf (aref pieces piece) (+ (sap-int (vector-sap octets)) at)
                     (aref pieces (1+ piece)) (length message))
               (incf at (length message)))
      (let ((sap (vector-sap pieces)))
        (and (persisting (:handle sender :what "send")
               ;; A batch can need more space than the sender's descriptor can wait for.
               (attempt-waiting (nil nil timeout deadline :handle sender)
                 (%sender-send-batch handle sap count deadline)))
             t)))))

(defun send-descriptors (sender octets descriptors &key (start 0) end timeout)
  "As SEND, with a list of at most 64 file descriptors, which the receiver gets duplicates of: TAKE-DESCRIPTORS. The
caller keeps its own. Not on a path. Also signals TOO-MANY-DESCRIPTORS-ERROR, REFUSED-ERROR on a path, SYSTEM-ERROR for
one that is not open."
  (declare (type sender sender))
  (let ((handle (handle-address sender)) (fds (coerce descriptors '(simple-array (signed-byte 32) (*)))))
    (with-octets-at (sap size) (octets start end)
      (with-pinned-objects (fds)
        (and (persisting (:handle sender :what "send")
               (attempt-waiting (sender handle timeout deadline :spins (handle-spins sender) :size size :handle sender)
                 (%sender-send-descriptors handle sap size (vector-sap fds) (length fds) deadline)))
             t)))))

(defun wait-released (sender &key timeout)
  "Waits up to TIMEOUT seconds until the receiver has released every message; of a PUBLISHER, until each subscriber that
gates has. Returns SENDER. An interrupt is served within 50 ms. Signals TIMED-OUT with the restart WAIT-LONGER, and of a
sender a CHANNEL-ENDED."
  (declare (type handle sender))
  (persisting (:handle (and (typep sender 'sender) sender))
    (attempt-waiting (nil nil timeout deadline :handle sender)
      (etypecase sender
        (sender (%sender-wait-released (handle-address sender) deadline))
        (publisher (%publisher-wait-released (handle-address sender) deadline)))))
  sender)

(defun trim (sender)
  "Returns memory without messages to the kernel: a lane keeps it after a burst. Does not wait; one or two system
calls."
  (declare (type sender sender))
  (with-pinned-objects (sender)
    (check (attempt (%sender-trim (handle-address sender)))))
  (values))

;;; ---- Reserving, for senders and for appenders

(defun refuse-reserving ()
  (error 'reserved-error
         :code +reserved+
         :detail "a WITH-RESERVED of this sender, or of this thread's appender, is open: only its body may write"))

(defmacro %reserve (address size traceparent deadline out)
  `(if ,traceparent
       (%sender-reserve-traced ,address ,size ,traceparent ,deadline ,out)
       (%sender-reserve ,address ,size ,deadline ,out)))

(defun reserve-slowly (sender size at timeout traceparent tried)
  "Reserves SIZE bytes, and writes their address to AT. Waits and signals: true, or NIL by DROP-MESSAGE. TRIED is the
first result, or NIL: there is a reservation."
  (declare (type sender sender) (type (unsigned-byte 62) size at))
  (unless tried (refuse-reserving))
  (let ((address (handle-address sender)))
    ;; It was noted.
    (when (typep tried 'peer-died-error) (setf tried nil))
    (persisting (:handle sender :what "send")
      (attempt-waiting (sender address timeout deadline :spins (handle-spins sender) :size size :tried tried
                                                        :handle sender)
        (%reserve address size traceparent deadline (int-sap at))))))

(defmacro sending-reserved ((sender wanted timeout traceparent) write)
  "As APPENDING-RESERVED, of SENDER."
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (address (gensym "ADDRESS")))
    `(let ((,tried nil) (,address (handle-address ,sender)))
       (guarding (,at 2)
           (progn
             (unless (handle-reserved ,sender)
               (setf (handle-reserved ,sender) t
                     ,tried (result (%reserve ,address ,wanted ,traceparent +no-wait+ (int-sap ,at))))
               (unless (typep ,tried 'fixnum) (note ,sender ,tried)))
             (when (or (eql ,tried +ok+)
                       (interruptible (reserve-slowly ,sender ,wanted ,at ,timeout ,traceparent ,tried)))
               (multiple-value-prog1 (interruptible (,write ,at))
                 (check (result (%sender-commit ,address (ldb (byte 62 0) (sap-ref-64 (int-sap ,at) 8)))))
                 ;; There is no reservation any more.
                 (setf (sap-ref-64 (int-sap ,at) 0) 0))))
         (when ,tried
           (unless (zerop (sap-ref-64 (int-sap ,at) 0))
             (%sender-abort ,address))
           (setf (handle-reserved ,sender) nil))))))

(defmacro with-reserved (((sap size) handle bytes &key timeout traceparent) &body body)
  "Reserves BYTES bytes of shared memory, runs BODY with SAP at them, aligned to 8, and sends or appends them as a
message when BODY ends normally: the first SIZE bytes, a variable that BODY may set to less than BYTES. If BODY is left
otherwise, nothing is sent. HANDLE is a SENDER, or APPENDERS. Until BODY ends, another use of that sender, or of those
appenders by this thread, is a RESERVED-ERROR. Waits for free space as SEND, up to TIMEOUT seconds, or as
APPEND-MESSAGE. :TRACEPARENT of a SENDER is as of SEND. Returns the values of BODY. Conditions and restarts as those;
after DROP-MESSAGE BODY does not run, and the value is NIL. Declare the type of HANDLE where speed matters.

    (pelton:with-reserved ((sap size) sender 16)
      (setf (sb-sys:sap-ref-64 sap 0) 1
            (sb-sys:sap-ref-64 sap 8) 2))"
  (let ((writer (gensym "HANDLE")) (wanted (gensym "BYTES")) (write (gensym "WRITE")) (at (gensym "AT"))
        ;; NIL is known at compile time, where it is nearly always.
        (trace (and traceparent (gensym "TRACEPARENT"))))
    `(let ((,writer ,handle) (,wanted ,bytes) ,@(when trace `((,trace ,traceparent))))
       (declare (type (unsigned-byte 62) ,wanted))
       (flet ((,write (,at)
                (declare (type (unsigned-byte 62) ,at))
                (let ((,size ,wanted))
                  (declare (type (unsigned-byte 62) ,size))
                  (multiple-value-prog1
                      (let ((,sap (sap-ref-sap (int-sap ,at) 0))) (declare (ignorable ,sap)) ,@body)
                    (setf (sap-ref-64 (int-sap ,at) 8) ,size)))))
         ;; Where the type of HANDLE is known, SBCL deletes one of the two calls, and inlines the function in the other.
         (declare (dynamic-extent #',write) (sb-ext:muffle-conditions sb-ext:code-deletion-note))
         (etypecase ,writer
           (sender (sending-reserved (,writer ,wanted ,timeout ,trace) ,write))
           (appenders (appending-reserved (,writer ,wanted) ,write)))))))

;;; ---- Receiving

(defmacro define-next-slowly (function kind)
  `(defun ,function (receiver at timeout end-p tried)
     (declare (type ,kind receiver) (type (unsigned-byte 62) at))
     (let ((handle (handle-address receiver)))
       (persisting (:handle receiver)
         (let ((result (attempt-waiting (,kind handle timeout deadline :spins (handle-spins receiver) :tried tried
                                                                       :handle receiver)
                         (,(name "%~a-receive" kind) handle deadline (int-sap at)))))
           (if (and end-p (typep result 'closed-error))
               (return-from ,function nil)
               result)))
       t)))

(define-next-slowly next-message-slowly receiver)

(declaim (inline next-message))
(defun next-message (receiver at timeout end-p tried)
  "Writes the next message to AT, a C structure. Waits. Returns true, or, if END-P, NIL at the end of the channel. TRIED
is as of RECEIVING."
  (declare (type receiver receiver) (type (unsigned-byte 62) at))
  (or (eql tried +ok+)
      (next-message-slowly receiver at timeout end-p tried)))

(defun deliver-again (receiver at)
  "Writes to AT the message that was received and not delivered."
  (declare (type taker receiver) (type (unsigned-byte 62) at))
  (loop for word in (shiftf (taker-undelivered receiver) '()) for offset from 0 by 8
        do (setf (sap-ref-64 (int-sap at) offset) word))
  +ok+)

(defun keep-undelivered (receiver at)
  "Keeps the message at AT for the next receive."
  (declare (type taker receiver) (type (unsigned-byte 62) at))
  (setf (taker-undelivered receiver)
        (loop for offset from 0 below +sizeof-message+ by 8 collect (sap-ref-64 (int-sap at) offset))))

(defmacro receiving ((at tried delivered receiver &optional (kind 'receiver)) &body body)
  "Runs BODY with AT, where a message is received to; it is there already if TRIED, the first result, is PELTON_OK.
However BODY is left, the message is released if BODY has set DELIVERED, as it does before it reads it; else the next
receive gets it. RECEIVER is of KIND. A pelton_delivery begins, and is as large, as a pelton_message."
  `(let ((,tried nil) (,delivered nil))
     (guarding (,at ,(/ +sizeof-message+ 8))
         (progn
           (setf ,tried (if (taker-undelivered (the ,kind ,receiver))
                            (deliver-again ,receiver ,at)
                            (result (,(name "%~a-receive" kind) (handle-address ,receiver) +no-wait+
                                     (int-sap ,at)))))
           (unless (typep ,tried 'fixnum)
             (setf ,tried (note ,receiver ,tried)))
           (interruptible ,@body))
       (unless (zerop (message.data (int-sap ,at)))
         (if ,delivered
             (,(name "%~a-release" kind) (handle-address ,receiver))
             (keep-undelivered ,receiver ,at))))))

(defun traceparent-by (write handle)
  "What WRITE, a function of the library, writes for a C handle: a string, or NIL."
  (declare (type function write))
  (with-words (sap (ceiling +traceparent-size+ 8))
    (when (eql (check (attempt (funcall write handle sap))) 1)
      (map-into (make-string (1- +traceparent-size+) :element-type 'base-char)
                (let ((i -1)) (lambda () (code-char (sap-ref-8 sap (incf i)))))))))

(defun received-traceparent (receiver)
  "The traceparent of the message that is received and not released, or NIL."
  (declare (type receiver receiver))
  (traceparent-by #'%receiver-traceparent (handle-address receiver)))

(defmacro with-message-at ((at sap size seq lane redelivered) &body body)
  "Runs BODY with the parts of the message at AT; each name may be NIL."
  `(let (,@(when sap `((,sap (int-sap (message.data (int-sap ,at)))) 
                       (,size (ldb (byte 62 0) (message.size (int-sap ,at))))))
         ,@(when seq `((,seq (message.seq (int-sap ,at)))))
         ,@(when lane `((,lane (message.lane (int-sap ,at)))))
         ,@(when redelivered `((,redelivered (logtest +redelivered+ (message.flags (int-sap ,at)))))))
     ,@(when sap `((declare (ignorable ,sap ,size))))
     ,@body))

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun with-traceparent (variable receiver body)
    "BODY, with VARIABLE bound to the traceparent of the received message; NIL: as it is."
    (if variable `((let ((,variable (received-traceparent ,receiver))) ,@body)) body)))

(defmacro with-received (((sap size &key seq lane redelivered traceparent) receiver &key timeout) &body body)
  "Receives the next message and runs BODY with SAP at its SIZE bytes in the lane, aligned to 8. It is released however
BODY is left, and must not be read afterwards. A sender that violates the rules can change it at any time: where that
matters, copy it once with SAP-OCTETS. SEQ, LANE, REDELIVERED and TRACEPARENT are variables for the values of RECEIVE.
Waits up to TIMEOUT seconds. Returns the values of BODY. Conditions as RECEIVE.

    (pelton:with-received ((sap size) receiver :timeout 1)
      (sb-sys:sap-ref-64 sap 0))"
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (delivered (gensym "DELIVERED")) (from (gensym "RECEIVER")))
    `(let ((,from ,receiver))
       (receiving (,at ,tried ,delivered ,from)
         (next-message ,from ,at ,timeout nil ,tried)
         (setf ,delivered t)
         (with-message-at (,at ,sap ,size ,seq ,lane ,redelivered)
           ,@(with-traceparent traceparent from body))))))

(defmacro do-received (((sap size &key seq lane redelivered traceparent) receiver &key timeout result) &body body)
  "As WITH-RECEIVED, for each message until the sender has closed; then returns RESULT. Waits up to TIMEOUT seconds for
each. BODY is in a block named NIL."
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (delivered (gensym "DELIVERED")) (from (gensym "RECEIVER"))
        (seconds (gensym "TIMEOUT")))
    `(let ((,from ,receiver) (,seconds ,timeout))
       (loop
         (receiving (,at ,tried ,delivered ,from)
           (cond ((next-message ,from ,at ,seconds t ,tried)
                  (setf ,delivered t)
                  (with-message-at (,at ,sap ,size ,seq ,lane ,redelivered)
                    ,@(with-traceparent traceparent from body)))
                 (t (return ,result))))))))

(defmacro do-messages ((octets receiver &key seq lane redelivered traceparent timeout result) &body body)
  "Runs BODY with OCTETS bound to each message, a fresh vector, until the sender has closed; then returns RESULT. The
message is released before BODY runs. Waits up to TIMEOUT seconds for each. BODY is in a block named NIL. Conditions as
RECEIVE."
  (let ((received (gensym "RECEIVED")) (from (gensym "RECEIVER")) (seconds (gensym "TIMEOUT")))
    (let ((seq (or seq (gensym))) (lane (or lane (gensym))) (redelivered (or redelivered (gensym)))
          (trace (or traceparent (gensym))))
      `(let ((,from ,receiver) (,seconds ,timeout))
         (loop
           (multiple-value-bind (,octets ,received ,seq ,lane ,redelivered ,trace)
               (receive-or-end ,from ,seconds t ,(and traceparent t))
             (declare (ignorable ,octets ,seq ,lane ,redelivered ,trace))
             (unless ,received (return ,result))
             ,@body))))))

(defun receive-or-end (receiver timeout end-p traced)
  (receiving (at tried delivered receiver)
    (when (next-message receiver at timeout end-p tried)
      (with-message-at (at sap size seq lane redelivered)
        (let ((octets (sap-octets sap size)) (traceparent (and traced (received-traceparent receiver))))
          (setf delivered t)
          (values octets t seq lane redelivered traceparent))))))

(defun receive (receiver &key timeout traced)
  "Receives the next message, a fresh vector of its bytes. Waits up to TIMEOUT seconds; interrupts are served. The other
values are its number in its lane; the number of its lane, 0 unless there are many senders; and whether an earlier
receiver may have received it too. With :TRACED T there is another value: the header traceparent of W3C Trace Context
with its sender's span, a string, or NIL.
Signals TIMED-OUT with the restart WAIT-LONGER; CLOSED-ERROR after the last message; PEER-DIED-ERROR with the restart
RESUME-CHANNEL, which waits for a successor of the sender, and receives from that; TOO-SMALL-ERROR if the heap has no
space: the message remains."
  (multiple-value-bind (octets received seq lane redelivered traceparent) (receive-or-end receiver timeout nil traced)
    (declare (ignore received))
    (values octets seq lane redelivered traceparent)))

(defun try-receive (receiver &key traced)
  "As RECEIVE, but never waits: returns NIL if there is no message."
  (receiving (at tried delivered receiver)
    (cond ((eql tried +ok+)
           (with-message-at (at sap size seq lane redelivered)
             (let ((octets (sap-octets sap size)) (traceparent (and traced (received-traceparent receiver))))
               (setf delivered t)
               (values octets seq lane redelivered traceparent))))
          (t
           (check (or (shiftf (handle-unsignalled receiver) nil) tried))
           nil))))

(defun receive-event (receiver &key timeout)
  "As RECEIVE, for a receiver of OPEN-GATHERING-RECEIVER with :MEMBERSHIP-EVENTS. Returns the kind, :MESSAGE, :JOINED,
:LEFT,
:DIED or :VIOLATED (the sender violated the layout, and is disconnected); the message, or NIL; the number of the lane;
and of a membership event the process and the user of the sender. RECEIVE skips these events."
  (declare (type receiver receiver))
  (let ((handle (handle-address receiver)))
    (flet ((take (deadline)
             (with-structure (sap event)
               (let ((code (%receiver-receive-event handle deadline sap)))
                 (when (eql code +ok+)
                   (if (eql (event.kind sap) +message+)
                       (keep-undelivered receiver (sap-int (event.message sap)))
                       (setf (receiver-events receiver)
                             (list (list (nth (event.kind sap) '(:message :joined :left :died :violated)) nil
                                         (event.lane sap) (event.peer-pid sap) (event.peer-uid sap))))))
                 code))))
      (persisting (:handle receiver)
        (if (or (taker-undelivered receiver) (receiver-events receiver))
            +ok+
            (attempt-waiting (receiver handle timeout deadline :spins (handle-spins receiver) :handle receiver)
              (take deadline))))
      (let ((event (without-interrupts (pop (receiver-events receiver)))))
        (if event
            (values-list event)
            (multiple-value-bind (octets seq lane) (receive receiver)
              (declare (ignore seq))
              (values :message octets lane)))))))

(defun receive-into (receiver buffer &key (start 0) end timeout)
  "Copies the next message into BUFFER, a vector of bytes, from START, and returns its size in bytes. Safe with any
sender. Waits and signals as RECEIVE. Signals TOO-SMALL-ERROR if the message has more bytes than START to END: it
remains."
  (declare (type receiver receiver))
  (with-octets-at (sap space) (buffer start end)
    (with-words (size 1)
      (let ((tried (if (taker-undelivered receiver)
                       nil
                       (attempt (%receiver-receive-copy (handle-address receiver) sap space +no-wait+ size)))))
        (cond ((eql tried +ok+) (sap-ref-64 size 0))
              ((typep tried 'too-small-error) (error tried))
              (t
               (note receiver tried)
               (receive-into-slowly receiver (sap-int sap) space timeout)))))))

(defun receive-into-slowly (receiver address space timeout)
  (declare (type receiver receiver) (type word address) (type (unsigned-byte 62) space))
  (receiving (at tried delivered receiver)
    (next-message receiver at timeout nil tried)
    (with-message-at (at sap size nil nil nil)
      (when (> size space)
        (error 'too-small-error
               :code +too-small+
               :detail (format nil "the message has ~d bytes, and there is space for ~d: it remains" size space)))
      (sb-kernel:system-area-ub8-copy sap 0 (int-sap address) 0 size)
      (setf delivered t)
      size)))

(defun receive-batch (receiver &key (count 64) timeout)
  "Returns a list of up to COUNT messages, fresh vectors, as many as are there. Waits for the first, and signals, as
RECEIVE. An interrupt that unwinds loses the messages copied so far: where that matters, use DO-RECEIVED."
  (declare (type receiver receiver) (type (integer 1 #.most-positive-fixnum) count))
  (cons (receive receiver :timeout timeout)
        (loop repeat (1- count)
              for octets = (handler-case (try-receive receiver)
                             ;; The next receive signals it.
                             (pelton-error (condition) (note receiver condition) nil))
              while octets collect octets)))

(defun take-descriptors (receiver)
  "Returns the file descriptors of the message that WITH-RECEIVED or DO-RECEIVED runs its body with, a list, once. The
caller closes them. Those that are not taken are closed with the body. After a takeover by a successor it waits up to a
second for late ones. Signals DESCRIPTORS-LOST-ERROR if this process has too few free ones, CORRUPT-ERROR,
SYSTEM-ERROR."
  (declare (type receiver receiver))
  (with-words (fds 32)
    (with-words (count 1)
      (check (without-interrupts
               (let ((result (result (%receiver-take-descriptors (handle-address receiver) fds 64 count))))
                 (if (eql result +ok+)
                     (loop for i below (sap-ref-64 count 0) collect (sap-ref-32 fds (* 4 i)))
                     result)))))))

;;; ---- Holding

(define-handle held ((sap (int-sap 0) :type system-area-pointer :read-only t)
                     (size 0 :type (unsigned-byte 62) :read-only t))
  "A message that stays in the lane, HELD-SIZE bytes at HELD-SAP, until CLOSE-HANDLE releases it, in any thread.")

(setf (documentation 'held-sap 'function) "The system area pointer to the bytes of a HELD message, aligned to 8."
      (documentation 'held-size 'function) "The size of a HELD message in bytes.")

(defun receive-held (receiver &key timeout)
  "Receives the next message in place and returns it as a HELD, while the receiver continues. CLOSE-HANDLE releases it,
in any order, in any thread. Space becomes free in order: a message that is held long delays the release of later ones.
Other values, waiting and conditions as RECEIVE."
  (receiving (at tried delivered receiver)
    (next-message receiver at timeout nil tried)
    (with-message-at (at sap size seq lane redelivered)
      (values (check (opening (out %make-held :sap sap :size size)
                       (let ((code (%receiver-hold (handle-address receiver) out)))
                         ;; It must not be released now.
                         (when (eql code +ok+) (setf (message.data (int-sap at)) 0))
                         code)))
              seq lane redelivered))))
