;;;; Channels: sending, receiving, reserving, waiting, ends.

(in-package #:pelton-tests)

(deftest names-are-in-utf-8
  (let ((name (format nil "path:~a" (in-directory (coerce '(#\LATIN_SMALL_LETTER_U_WITH_DIAERESIS) 'string)))))
    (let ((sb-alien::*default-c-string-external-format* :latin-1))
      (pelton:with-sender (sender name :create t) (pelton:send sender (bytes "x")))
      (pelton:with-engine (engine)
        (is (equal (pelton:list-directory engine *directory*)
                   (list (cons (string (code-char 252)) :directory))))))
    (is (search (subseq name 5) (princ-to-string (signals pelton:no-channel-error
                                                          (pelton:open-sender (concatenate 'string name "2"))))))))

(deftest the-package-can-be-evaluated-again
  (handler-bind ((warning #'error))
    (is (load (merge-pathnames "package.lisp" (asdf:system-source-directory "pelton"))))))

(deftest a-handle-is-closed-though-an-interrupt-comes-before-the-body
  (let ((path (format nil "path:~a" (in-directory "channel"))) (socket (format nil "unix:~a" (in-directory "socket"))))
    (flet ((open-ones (type)
             (loop for handle being the hash-keys of pelton::*handles*
                   when (and (typep handle type) (pelton:handle-open-p handle)) collect handle)))
      ;; Of types that no other thread opens meanwhile.
      (macrolet ((closed (type form)
                   `(let ((before (open-ones ',type)))
                      (is (call-interrupted-at-adoption (lambda () ,form (error "not reached"))))
                      (is (null (set-difference (open-ones ',type) before))))))
        (closed t (pelton:with-channel (sender receiver) (error "not reached")))
        (closed t (pelton:with-sender (sender path :create t) (error "not reached")))
        (closed t (pelton:with-service (service socket) (error "not reached")))
        (closed t (pelton:with-appenders (appenders #'identity :flush-interval 3600) (error "not reached")))
        (closed t (pelton:with-engine (engine) (error "not reached")))
        (pelton:with-engine (engine)
          (closed t (pelton:with-file (file engine "/dev/null") (error "not reached"))))
        (pelton:with-gathering-receiver (receiver nil)
          (closed t (pelton:with-senders (senders receiver) (error "not reached"))))
        (multiple-value-bind (sender receiver) (pelton:make-channel)
          (closed t (pelton:with-flush (flush receiver #'identity) (error "not reached")))
          (pelton:close-handle sender))
        ;; Openings that have waited for a peer.
        (let ((connecting (in-thread (handler-case (pelton:with-sender (sender socket :timeout *limit*) t)
                                       (pelton:pelton-error () nil)))))
          (closed (or pelton:receiver pelton::listener)
                  (pelton:with-receiver (receiver socket :accept t :timeout *limit*) (error "not reached")))
          (joined connecting))
        (let ((accepting (in-thread (handler-case (pelton:with-receiver (receiver socket :accept t :timeout *limit*) t)
                                      (pelton:pelton-error () nil)))))
          (closed pelton:sender (pelton:with-sender (sender socket :timeout *limit*) (error "not reached")))
          (joined accepting))))))

(defun traceparent (i)
  "A valid one of any number above 0."
  (format nil "00-~(~32,'0x~)-~(~16,'0x~)-01" i i))

(deftest messages-have-the-traceparent-that-their-sender-gave-them
  (pelton:with-channel (sender receiver :traced t :capacity 65536)
    (pelton:send sender (bytes "a") :traceparent (traceparent 1))
    (pelton:send sender (bytes "b"))
    (is (pelton:try-send sender (bytes "c") :traceparent (traceparent 3)))
    (pelton:with-reserved ((sap size) sender 8 :traceparent (traceparent 4))
      (setf (sap-ref-64 sap 0) 4))
    (pelton:send sender (bytes "e") :traceparent "not one")
    (pelton:send sender (bytes "f") :traceparent (traceparent 6))
    (pelton:send sender (bytes "g") :traceparent (traceparent 7))
    (pelton:with-received ((sap size :traceparent found) receiver :timeout 0)
      (is (equal (traceparent 1) found))
      (is (equal "a" (text (pelton:sap-octets sap size)))))
    (is (null (nth-value 4 (pelton:receive receiver :timeout 0 :traced t))))
    (is (equal (traceparent 3) (nth-value 4 (pelton:try-receive receiver :traced t))))
    (pelton:with-received ((sap size :traceparent found :seq seq) receiver :timeout 0)
      (is (equal (traceparent 4) found))
      (is (eql 4 seq))
      (is (eql 4 (sap-ref-64 sap 0))))
    (is (equal '("e" nil) (multiple-value-bind (octets seq lane redelivered found)
                              (pelton:receive receiver :timeout 0 :traced t)
                            (declare (ignore seq lane redelivered))
                            (list (text octets) found))))
    ;; It is still that message's after an interrupt that unwound.
    (with-an-interrupt-pending (pelton:receive receiver :timeout *limit*))
    (is (equal (traceparent 6) (nth-value 4 (pelton:receive receiver :timeout 0 :traced t))))
    (pelton:close-handle sender)
    (let ((found '()))
      (pelton:do-messages (octets receiver :traceparent traceparent :timeout 0)
        (push (list (text octets) traceparent) found))
      (is (equal found (list (list "g" (traceparent 7))))))))

(deftest a-traced-message-waits-for-space-and-for-its-receiver
  (pelton:with-channel (sender receiver :traced t :capacity 4096)
    (let ((thread (in-thread (dotimes (i 2000)
                               (pelton:send sender (number-octets i) :timeout *limit* :traceparent (traceparent (1+ i)))
                               (pelton:with-reserved ((sap size) sender 8 :timeout *limit*
                                                                       :traceparent (traceparent (1+ i)))
                                 (setf (sap-ref-64 sap 0) i))))))
      (dotimes (i 4000)
        (multiple-value-bind (octets seq lane redelivered found)
            (pelton:receive receiver :timeout *limit* :traced t)
          (declare (ignore seq lane redelivered))
          (unless (and (equalp octets (number-octets (floor i 2)))
                       (equal found (traceparent (1+ (floor i 2)))))
            (is (equal found (list i octets))))))
      (joined thread))))

(deftest without-the-option-a-message-goes-without-its-traceparent
  (pelton:with-channel (sender receiver)
    (pelton:send sender (bytes "x") :traceparent (traceparent 1))
    (multiple-value-bind (octets seq lane redelivered found) (pelton:receive receiver :timeout 0 :traced t)
      (declare (ignore seq lane redelivered))
      (is (equal (list (text octets) found) '("x" nil)))))
  (pelton:with-gathering-receiver (receiver nil)
    (pelton:with-senders (senders receiver)
      (pelton:send senders (bytes "x") :traceparent (traceparent 1))
      (is (null (nth-value 4 (pelton:receive receiver :timeout *limit* :traced t)))))))

(deftest a-spinning-receiver-times-out-and-is-interrupted
  (pelton:with-channel (sender receiver :wait :spin :capacity 65536)
    (signals pelton:timed-out (pelton:receive receiver :timeout 0.01))
    (signals sb-ext:timeout (sb-ext:with-timeout 0.02 (pelton:receive receiver)))
    (let ((thread (in-thread (dotimes (i 5000) (pelton:send sender (number-octets i))))))
      (dotimes (i 5000) (is (equalp (pelton:receive receiver :timeout *limit*) (number-octets i))))
      (joined thread))
    (let ((octets (bytes "by its place")))
      (sb-sys:with-pinned-objects (octets)
        (is (pelton:send-sap sender (sb-sys:sap+ (sb-sys:vector-sap octets) 3) 9))))
    (is (equal (text (pelton:receive receiver)) "its place"))))

(deftest each-code-has-a-condition-with-the-librarys-text
  (loop for (nil code) in pelton::*codes*
        do (let ((condition (gethash code pelton::*conditions*)))
             (is (eq :external (nth-value 1 (find-symbol (symbol-name condition) '#:pelton))))
             ;; PELTON_TIMED_OUT shares the condition of PELTON_AGAIN.
             (unless (eql code pelton::+timed-out+)
               (is (search (format nil ", ~d: ~a." code (pelton::code-text code)) (documentation condition 'type))))))
  ;; None is missing.
  (let ((last (reduce #'min (mapcar #'second pelton::*codes*))))
    (is (equal (pelton::code-text (1- last)) "an unknown code"))
    (is (eql (length pelton::*codes*) (- last))))
  (is (subtypep 'pelton:peer-died-error 'pelton:channel-ended))
  (is (subtypep 'pelton:not-reserved-error 'pelton:usage-error))
  (is (subtypep 'pelton:timed-out 'pelton:pelton-error)))

(deftest a-package-can-use-pelton-beside-common-lisp
  (let ((package (make-package (gensym "USER") :use '(#:cl #:pelton))))
    (is (null (package-shadowing-symbols package)))
    (delete-package package)))

(deftest everything-exported-is-documented
  (is (documentation (find-package '#:pelton) t))
  (do-external-symbols (symbol '#:pelton)
    ;; A symbol that names nothing is a mistake in the package.
    (let ((named 0))
      (flet ((documented (is-defined kind)
               (when is-defined
                 (incf named)
                 (is (plusp (length (documentation symbol kind)))))))
        (documented (fboundp symbol) 'function)
        (documented (or (find-class symbol nil) (sb-ext:valid-type-specifier-p symbol)) 'type))
      (is (plusp named)))))

(deftest a-batch-becomes-visible-at-once-and-in-order
  (pelton:with-channel (sender receiver :capacity 65536)
    (is (pelton:send-batch sender (list (bytes "one") (bytes "")
                                        (make-array 3 :element-type '(unsigned-byte 8) :displaced-to (bytes "three")))))
    (is (equal (mapcar #'text (pelton:receive-batch receiver :count 2 :timeout *limit*)) '("one" "")))
    (pelton:send sender (bytes "four"))
    (is (equal (mapcar #'text (pelton:receive-batch receiver)) '("thr" "four")))
    ;; All or nothing.
    (signals pelton:too-large-error (pelton:send-batch sender (loop repeat 5 collect (make-octets 20000))))
    (is (null (pelton:try-receive receiver)))
    (let ((sent 0))
      (loop while (handler-case (pelton:send-batch sender (list (make-octets 8000) (make-octets 8)) :timeout 0)
                    (pelton:timed-out () nil))
            do (incf sent))
      (is (plusp sent))
      (let ((thread (in-thread (pelton:send-batch sender (list (make-octets 8000) (make-octets 8)) :timeout *limit*)
                               (pelton:close-handle sender)))
            (received '()))
        (loop do (handler-case (setf received (append received (pelton:receive-batch receiver :timeout *limit*)))
                   (pelton:closed-error () (return))))
        (joined thread)
        (is (equal (mapcar #'length received) (loop repeat (1+ sent) append '(8000 8))))))))

(deftest descriptors-are-sent-with-a-message
  (let ((name (format nil "unix:~a" (in-directory "socket"))))
    (with-open-file (stream (in-directory "file") :direction :output) (write-string "passed on" stream))
    (flet ((contents (fd)
             (with-open-stream (stream (sb-sys:make-fd-stream fd :input t :buffering :full)) (read-line stream))))
      (let ((thread (in-thread
                      (pelton:with-receiver (receiver name :accept t :timeout *limit*)
                        (list (pelton:with-received ((sap size) receiver :timeout *limit*)
                                (list (text (pelton:sap-octets sap size))
                                      (mapcar #'contents (pelton:take-descriptors receiver))
                                      (pelton:take-descriptors receiver)))
                              (pelton:with-received ((sap size) receiver :timeout *limit*)
                                                    (pelton:take-descriptors receiver)))))))
        (pelton:with-sender (sender name :timeout *limit*)
          (let ((fds (loop repeat 2 collect (sb-posix:open (in-directory "file") sb-posix:o-rdonly))))
            (is (pelton:send-descriptors sender (bytes "two") fds :timeout *limit*))
            (mapc #'sb-posix:close fds)
            (is (pelton:send-descriptors sender (bytes "none") '() :timeout *limit*))
            (signals pelton:too-many-descriptors-error (pelton:send-descriptors sender (bytes "x")
                                                                                (make-list 65 :initial-element 0)))
            (signals pelton:system-error (pelton:send-descriptors sender (bytes "x") '(987654)))
            (pelton:wait-released sender :timeout *limit*)))
        (is (equal (joined thread) '(("two" ("passed on" "passed on") ()) ())))))))

(deftest held-messages-remain-and-are-released-in-any-order
  (pelton:with-channel (sender receiver :capacity 65536)
    (dotimes (i 3) (pelton:send sender (number-octets i)))
    (with-an-interrupt-pending (pelton:receive-held receiver))
    (let ((all (loop repeat 3 collect (pelton:receive-held receiver :timeout *limit*))))
      (is (equal (mapcar (lambda (held) (sap-ref-64 (pelton:held-sap held) 0)) all) '(0 1 2)))
      (is (equal (mapcar #'pelton:held-size all) '(8 8 8)))
      (is (eql 3 (getf (pelton:info sender) :unreleased)))
      (pelton:close-handle (second all))
      (joined (in-thread (pelton:close-handle (first all))))
      (is (eql 2 (sap-ref-64 (pelton:held-sap (third all)) 0)))
      (signals pelton:timed-out (pelton:receive receiver :timeout 0))
      (pelton:close-handle (third all))
      (is (null (pelton:try-receive receiver)))
      (is (eql 0 (getf (pelton:info sender) :unreleased))))))

(deftest messages-of-any-size-arrive-unchanged
  (pelton:with-channel (sender receiver :capacity (ash 1 20))
    (dolist (size '(0 1 7 8 9 255 4096 200000))
      (let ((message (make-octets size)))
        (dotimes (i size) (setf (aref message i) (mod (* i 7) 251)))
        (is (pelton:send sender message))
        (multiple-value-bind (found seq lane redelivered) (pelton:receive receiver)
          (is (equalp found message))
          (is (plusp seq))
          (is (eql lane 0))
          (is (not redelivered)))))
    (is (null (pelton:try-receive receiver)))))

(deftest a-part-of-a-vector-is-sent-and-bounds-are-checked
  (pelton:with-channel (sender receiver)
    (let ((message (bytes "0123456789"))
          (filled (make-array 10 :element-type '(unsigned-byte 8) :fill-pointer 3 :initial-element 65)))
      (pelton:send sender message :start 2 :end 5)
      (is (equal (text (pelton:receive receiver)) "234"))
      (pelton:send sender filled)
      (is (equal (text (pelton:receive receiver)) "AAA"))
      (pelton:send sender (make-array 2 :element-type '(unsigned-byte 8) :displaced-to message
                                      :displaced-index-offset 4))
      (is (equal (text (pelton:receive receiver)) "45"))
      (signals error (pelton:send sender message :start 5 :end 11))
      (signals error (pelton:send sender message :start 6 :end 5))
      (signals error (pelton:send sender message :start -1))
      (signals error (pelton:send sender filled :end 4))
      (signals type-error (pelton:send sender "a string"))
      (is (null (pelton:try-receive receiver))))))

(deftest a-reservation-is-sent-only-when-its-body-ends-normally
  (pelton:with-channel (sender receiver)
    (pelton:with-reserved ((sap size) sender 16)
      (is (eql size 16))
      (setf (sap-ref-64 sap 0) 41 (sap-ref-64 sap 8) 42))
    (pelton:with-received ((sap size) receiver)
      (is (eql size 16))
      (is (eql (sap-ref-64 sap 8) 42)))
    ;; Less of it.
    (pelton:with-reserved ((sap size) sender 100)
      (setf (sap-ref-8 sap 0) 7 size 1))
    (is (equalp (pelton:receive receiver) #(7)))
    ;; Left by a throw, an error, and by a return.
    (catch 'out (pelton:with-reserved ((sap size) sender 8) (throw 'out nil)))
    (ignore-errors (pelton:with-reserved ((sap size) sender 8) (error "no")))
    (block nil (pelton:with-reserved ((sap size) sender 8) (return)))
    (is (null (pelton:try-receive receiver)))
    ;; More than was reserved is refused, and nothing of it seen.
    (signals pelton:too-large-error (pelton:with-reserved ((sap size) sender 8) (setf size 9)))
    (is (null (pelton:try-receive receiver)))
    (pelton:send sender (bytes "after"))
    (is (equal (text (pelton:receive receiver)) "after"))))

(deftest a-received-message-is-released-however-the-body-is-left
  (pelton:with-channel (sender receiver)
    (dotimes (i 3) (pelton:send sender (number-octets i)))
    (ignore-errors (pelton:with-received ((sap size) receiver) (error "no")))
    (catch 'out (pelton:with-received ((sap size) receiver) (throw 'out nil)))
    (pelton:with-received ((sap size :seq seq) receiver)
      (is (eql seq 3))
      (is (eql (sap-ref-64 sap 0) 2)))
    (is (eql (getf (pelton:info sender) :unreleased) 0))))

(deftest a-loop-ends-with-the-channel
  (pelton:with-channel (sender receiver)
    (let ((sum 0) (thread (in-thread
                            (dotimes (i 1000) (pelton:send sender (number-octets i)))
                            (pelton:close-handle sender))))
      (is (eq :ended (pelton:do-received ((sap size) receiver :timeout *limit* :result :ended)
                       (incf sum (sap-ref-64 sap 0)))))
      (joined thread)
      (is (eql sum 499500))
      (signals pelton:closed-error (pelton:receive receiver))))
  (pelton:with-channel (sender receiver)
    (dotimes (i 10) (pelton:send sender (number-octets i)))
    (is (eql 3 (pelton:do-messages (octets receiver :seq seq) (when (eql seq 3) (return seq)))))
    (pelton:close-handle sender)
    (let ((left 0))
      (pelton:do-messages (octets receiver) (incf left))
      (is (eql left 7)))))

(deftest a-full-or-empty-lane-times-out-with-a-restart-that-waits-longer
  (pelton:with-channel (sender receiver :capacity 65536)
    (signals pelton:timed-out (pelton:receive receiver :timeout 0.01))
    (let ((message (make-octets 20000)) (sent 0))
      (loop while (pelton:try-send sender message) do (incf sent))
      (is (plusp sent))
      (signals pelton:timed-out (pelton:send sender message :timeout 0.01))
      (signals pelton:timed-out (pelton:with-reserved ((sap size) sender 20000 :timeout 0.01) (error "not reached")))
      (let ((waited 0) (thread nil))
        (is (handler-bind ((pelton:timed-out (lambda (condition)
                                               (declare (ignore condition))
                                               (when (eql (incf waited) 2)
                                                 (setf thread (in-thread (dotimes (i sent) (pelton:receive receiver)))))
                                               (pelton:wait-longer))))
              (pelton:send sender message :timeout 0.05)))
        (is (>= waited 2))
        (joined thread)
        (is (eql (length (pelton:receive receiver)) 20000)))
      (loop while (pelton:try-send sender message))
      (is (null (handler-bind ((pelton:timed-out #'pelton:drop-message))
                  (pelton:send sender message :timeout 0.01)))))))

(deftest a-message-too-large-is-signalled-and-can-be-dropped
  (pelton:with-channel (sender receiver :message-bytes-max 1000)
    (let ((condition (signals pelton:too-large-error (pelton:send sender (make-octets 1001)))))
      (is (search "1001" (princ-to-string condition)))
      (is (eql (pelton:pelton-error-code condition) -4)))
    (is (null (handler-bind ((pelton:too-large-error (lambda (condition)
                                                       (is (null (find-restart 'pelton:wait-longer condition)))
                                                       (pelton:drop-message))))
                (pelton:send sender (make-octets 1001)))))
    (is (null (pelton:try-receive receiver)))))

(deftest a-buffer-too-small-leaves-the-message
  (pelton:with-channel (sender receiver)
    (pelton:send sender (bytes "twelve bytes"))
    (signals pelton:too-small-error (pelton:receive-into receiver (make-octets 5)))
    (let ((buffer (make-octets 20)))
      (is (eql 12 (pelton:receive-into receiver buffer :start 3)))
      (is (equal (text (subseq buffer 3 15)) "twelve bytes")))))

(deftest a-thread-that-waits-can-be-interrupted-and-unwound
  (pelton:with-channel (sender receiver)
    (let* ((seen (sb-thread:make-semaphore)) (begun (sb-thread:make-semaphore))
           (thread (in-thread (catch 'out
                                (sb-thread:signal-semaphore begun)
                                (pelton:receive receiver)))))
      (is (sb-thread:wait-on-semaphore begun :timeout *limit*))
      ;; It may still busy-poll, or sleep: both serve the interrupt.
      (sb-thread:interrupt-thread thread (lambda () (sb-thread:signal-semaphore seen)))
      (is (sb-thread:wait-on-semaphore seen :timeout *limit*))
      (sb-thread:interrupt-thread thread (lambda () (throw 'out :left)))
      (is (eq (joined thread) :left)))
    (signals sb-ext:timeout (sb-ext:with-timeout 0.05 (pelton:receive receiver)))
    ;; The channel is as it was.
    (pelton:send sender (bytes "still"))
    (is (equal (text (pelton:receive receiver)) "still"))))

(deftest without-interrupts-is-without-them
  (pelton:with-channel (sender receiver)
    (let* ((served nil) (waiting (sb-thread:make-semaphore))
           (interrupted (sb-thread:make-semaphore))
           (thread (in-thread
                     (sb-sys:without-interrupts
                       (sb-thread:signal-semaphore waiting)
                       (sb-thread:wait-on-semaphore interrupted :timeout *limit*)
                       ;; An interrupt is pending all the time.
                       (signals pelton:timed-out (pelton:receive receiver :timeout 0.02))
                       (pelton:send sender (bytes "now"))
                       (pelton:receive receiver)
                       (list :received served)))))
      (sb-thread:wait-on-semaphore waiting)
      (sb-thread:interrupt-thread thread (lambda () (setf served t)))
      (sb-thread:signal-semaphore interrupted)
      (is (equal (joined thread) '(:received nil)))
      (is served))))

(deftest a-message-that-an-interrupt-kept-back-goes-to-the-next-receive
  (pelton:with-channel (sender receiver)
    (dotimes (i 6) (pelton:send sender (number-octets i)))
    (flet ((next () (sb-kernel:%vector-raw-bits (pelton:receive receiver :timeout *limit*) 0)))
      (with-an-interrupt-pending (pelton:receive receiver))
      (is (eql (next) 0))
      (with-an-interrupt-pending (pelton:with-received ((sap size) receiver) (error "not reached")))
      (is (eql 1 (pelton:with-received ((sap size) receiver) (sap-ref-64 sap 0))))
      (with-an-interrupt-pending (pelton:do-messages (octets receiver) (error "not reached")))
      (let ((buffer (make-octets 8)))
        (is (eql 8 (pelton:receive-into receiver buffer)))
        (is (eql 2 (sb-kernel:%vector-raw-bits buffer 0))))
      (with-an-interrupt-pending (pelton:try-receive receiver))
      (is (equalp (pelton:try-receive receiver) (number-octets 3)))
      ;; It is kept again after a second interrupt.
      (with-an-interrupt-pending (pelton:receive receiver))
      (with-an-interrupt-pending (pelton:receive receiver))
      (is (eql (next) 4))
      ;; A message that the body has got is released, however the body is left.
      (catch 'out (pelton:with-received ((sap size) receiver) (throw 'out nil)))
      (is (null (pelton:try-receive receiver)))
      (is (eql 0 (getf (pelton:info sender) :unreleased))))))

(deftest interrupts-while-sending-lose-nothing-and-double-nothing
  (pelton:with-channel (sender receiver :capacity 65536)
    (let* ((count 20000) (ended nil)
           (thread (in-thread
                     (dotimes (i count) (pelton:send sender (number-octets i)))
                     (pelton:close-handle sender)))
           (disturber (in-thread (disturb thread (lambda () ended) (lambda () (make-octets 100)))))
           (next 0))
      (pelton:do-received ((sap size) receiver :timeout *limit*)
        (is (eql (sap-ref-64 sap 0) next))
        (incf next))
      (setf ended t)
      (joined thread)
      (joined disturber)
      (is (eql next count)))))

;; An interrupt can come after a message was delivered to the body, and before the body has noted it.
(deftest interrupts-that-unwind-while-receiving-double-nothing-and-lose-at-most-one-each
  (pelton:with-channel (sender receiver :capacity 65536)
    (let* ((count 20000) (interrupts 0) (last -1) (missing 0) (ended nil)
           (sending (in-thread (dotimes (i count) (pelton:send sender (number-octets i) :timeout *limit*))
                               (pelton:close-handle sender)))
           (thread (in-thread
                     (loop until ended
                           do (catch 'out
                                (let ((*inside* t))
                                  (pelton:do-received ((sap size) receiver :timeout *limit*)
                                    (let ((number (sap-ref-64 sap 0)))
                                      (sb-sys:without-interrupts
                                        (is (> number last))
                                        (incf missing (- number last 1))
                                        (setf last number))
                                      ;; Not faster than the interrupts come.
                                      (loop until (>= interrupts (floor number 1000)) do (sb-thread:thread-yield))))
                                  (setf ended t))))))
           (disturber (in-thread (disturb thread (lambda () ended)
                                          (lambda () (when *inside* (incf interrupts) (throw 'out nil)))))))
      (joined sending)
      (joined thread)
      (joined disturber)
      (is (>= interrupts 19))
      (is (<= (+ missing (- count last 1)) interrupts))
      (signals pelton:closed-error (pelton:try-receive receiver)))))

(deftest many-threads-send-each-through-its-own-lane
  (pelton:with-gathering-receiver (receiver nil :membership-events t)
    (pelton:with-senders (senders receiver)
      (let* ((threads (loop for thread below 4
                            collect (let ((thread thread))
                                      (in-thread (dotimes (i 1000)
                                                   (pelton:send senders (number-octets (+ (* thread 1000000) i))))))))
             (next (make-hash-table)) (joined 0) (left 0))
        (loop until (eql left 4)
              do (multiple-value-bind (kind octets lane pid uid) (pelton:receive-event receiver :timeout *limit*)
                   (ecase kind
                     (:joined (incf joined)
                      (is (eql pid (sb-posix:getpid)))
                      (is (eql uid (sb-posix:geteuid))))
                     ;; The end of a thread closes its lane.
                     (:left (incf left))
                     (:message
                      (multiple-value-bind (thread i) (floor (sb-kernel:%vector-raw-bits octets 0) 1000000)
                        (is (equal (gethash lane next (list thread 0)) (list thread i)))
                        (setf (gethash lane next) (list thread (1+ i))))))))
        (mapc #'joined threads)
        (is (eql joined 4))
        (is (eql (hash-table-count next) 4))))))

(deftest endpoints-connect-and-the-end-is-signalled
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread
                   (pelton:with-receiver (receiver name :accept t :timeout *limit*)
                     (list (text (pelton:receive receiver :timeout *limit*))
                           (handler-case (pelton:receive receiver :timeout *limit*)
                             (pelton:channel-ended (condition) (type-of condition))))))))
    (pelton:with-sender (sender name :timeout *limit*)
      (pelton:send sender (bytes "hello"))
      (pelton:wait-released sender :timeout *limit*))
    (is (equal (joined thread) '("hello" pelton:closed-error)))
    (signals pelton:no-listener-error (pelton:open-sender name))
    (signals pelton:name-error (pelton:open-sender "no/name"))
    (signals pelton:option-error (pelton:make-channel :capacity 5))))

(deftest opening-waits-for-a-later-listener-or-until-the-timeout
  (let ((name (format nil "unix:~a" (in-directory "socket"))) (waits 0) (accepting nil))
    (signals pelton:no-listener-error (pelton:open-sender name))
    (signals pelton:no-listener-error (pelton:open-receiver name :timeout 0))
    (dolist (open (list #'pelton:open-sender #'pelton:open-receiver #'pelton:open-client))
      (let ((condition (signals pelton:timed-out (funcall open name :timeout 0.02))))
        (is (search name (princ-to-string condition)))))
    (signals (or pelton:timed-out pelton:no-channel-error)
      (pelton:open-sender (format nil "path:~a" (in-directory "none")) :timeout 0.02))
    ;; The second wait finds the listener, which begins after the first one has ended.
    (handler-bind ((pelton:timed-out (lambda (condition)
                                       (when (eql (incf waits) 1)
                                         (setf accepting (in-thread
                                                           (pelton:with-receiver (receiver name :accept t
                                                                                                :timeout *limit*)
                                                             (text (pelton:receive receiver :timeout *limit*))))))
                                       (pelton:wait-longer condition))))
      (pelton:with-sender (sender name :timeout 0.05)
        (pelton:send sender (bytes "late"))
        (is (equal (joined accepting) "late"))))
    (is (plusp waits))))

(deftest an-opening-is-interrupted-and-leaves-nothing-open
  (flet ((descriptors () (length (directory "/proc/self/fd/*" :resolve-symlinks nil))))
    (let ((name (format nil "unix:~a" (in-directory "socket"))) (before nil))
      (flet ((interrupted (open &rest options)
               (signals sb-ext:timeout (sb-ext:with-timeout 0.02 (apply open name :timeout *limit* options)))
               (with-an-interrupt-pending (apply open name :timeout *limit* options))))
        (dolist (open (list #'pelton:open-sender #'pelton:open-receiver #'pelton:open-client))
          ;; The first time may open descriptors that stay.
          (interrupted open)
          (setf before (descriptors))
          (dotimes (i 5) (interrupted open))
          (is (<= (descriptors) before)))
        ;; With a listener that never answers the handshake.
        (let ((listener (pelton::opening (out pelton::%make-listener)
                          (pelton::%listener-open name (sb-sys:int-sap 0) out))))
          (unwind-protect
               (progn
                 (interrupted #'pelton:open-sender)
                 (interrupted #'pelton:open-client)
                 (signals pelton:timed-out (pelton:open-sender name :timeout 0.02)))
            (pelton:close-handle listener)))))))

(deftest a-path-keeps-sent-messages
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (signals pelton:no-channel-error (pelton:open-sender name))
    (pelton:with-sender (sender name :create t :capacity 65536)
      (pelton:send sender (bytes "kept"))
      (pelton:sync sender))
    (pelton:with-receiver (receiver name)
      (signals pelton:role-taken-error (pelton:open-receiver name))
      (is (equal (text (pelton:receive receiver)) "kept")))))

(deftest using-a-closed-handle-is-a-usage-error-and-closing-it-again-is-not
  (multiple-value-bind (sender receiver) (pelton:make-channel)
    (pelton:close-handle sender)
    (pelton:close-handle sender)
    (is (not (pelton:handle-open-p sender)))
    (signals pelton:usage-error (pelton:send sender (bytes "x")))
    (signals pelton:usage-error (pelton:info sender))
    (pelton:close-handle receiver)
    (signals pelton:usage-error (pelton:receive receiver))))

(defclass said (sb-gray:fundamental-character-output-stream)
  ((characters :initform '())
   (lock :initform (sb-thread:make-mutex) :reader lock-of))
  (:documentation "A stream that one thread writes and another reads."))

(defmethod sb-gray:stream-write-char ((said said) character)
  (sb-thread:with-mutex ((lock-of said)) (push character (slot-value said 'characters))))

(defmethod sb-gray:stream-line-column ((said said)) nil)

(defun all-said (said)
  (sb-thread:with-mutex ((lock-of said)) (coerce (reverse (slot-value said 'characters)) 'string)))

(deftest a-handle-that-becomes-garbage-is-closed-with-a-warning
  (let ((said (make-instance 'said)) (before *error-output*))
    (sb-ext:gc :full t)
    (flet ((forget (count)
             (loop repeat count
                   collect (multiple-value-bind (sender receiver) (pelton:make-channel :capacity 65536)
                             (pelton:send sender (bytes "x"))
                             receiver))))
      (unwind-protect
           (let ((receivers (progn (setf (symbol-value '*error-output*) (make-synonym-stream 'said-to)
                                         (symbol-value 'said-to) said)
                                   (joined (in-thread (forget 20))))))
             ;; A conservative collector may keep some of them.
             (until (progn (sb-ext:gc :full t)
                           (plusp (count-if (lambda (receiver)
                                              (handler-case (progn (loop while (pelton:try-receive receiver)) nil)
                                                (pelton:closed-error () t)))
                                            receivers))))
             (until (search "a sender became garbage" (all-said said)))
             (mapc #'pelton:close-handle receivers))
        (setf (symbol-value '*error-output*) before)))))

(defvar said-to)
